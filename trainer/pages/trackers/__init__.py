"""Trackers: metrics and transcripts as two files, and optionally one service more."""

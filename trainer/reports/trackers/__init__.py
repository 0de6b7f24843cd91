"""Where metrics and transcripts go: always two files, and one more place when asked for."""

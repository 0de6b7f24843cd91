"""What reports are made of: charts, pages, transcripts. Torch-free."""

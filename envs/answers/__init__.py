"""The answer in a response: where it stands, which number it is, whether it is right."""

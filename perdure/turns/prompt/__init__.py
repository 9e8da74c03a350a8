"""What the model is sent besides the transcript: instructions, summary, recalled memories and cases."""

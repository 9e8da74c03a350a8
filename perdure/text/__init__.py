"""Text from outside: linear-time patterns, strict JSON, quotation marks, contradiction."""

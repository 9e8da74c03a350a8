"""Memory: what is known of a user and of what was said, layer by layer.

State is another thing: what a turn needs in order to survive is in `turns` and `snapshots`.
"""

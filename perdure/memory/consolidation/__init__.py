"""Consolidation: ended sessions become memories (L2 to L3)."""

"""Tests that run each example as its README says, with throwaway servers."""

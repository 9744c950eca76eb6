"""Tests for accelerators that need none."""

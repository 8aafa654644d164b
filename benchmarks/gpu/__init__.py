"""Measurements on a card."""

"""Vocabularies split over several ranks."""

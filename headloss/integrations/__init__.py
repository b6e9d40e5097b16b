"""Adapters to trainers and model libraries.  Nothing here is imported by headloss itself."""

"""Plumbing that every part of hooktrain stands on."""

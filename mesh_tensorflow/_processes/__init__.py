"""Processes of one program: discovery and failure detection."""

"""Use cases that need several steps of the flow, shared by the command line and the web."""

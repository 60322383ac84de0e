"""The parts of the scripted Ollama server; use it through `support.scripted_ollama`."""

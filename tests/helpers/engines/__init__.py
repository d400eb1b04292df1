"""Stand-ins for vLLM and SGLang whose signatures are those of published versions."""

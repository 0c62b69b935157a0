"""For code written against vLLM: the functions of its kernels (`custom_ops`), and a plugin for vLLM (`plugin`)."""

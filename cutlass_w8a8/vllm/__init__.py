"""For code written against vLLM: its kernels' functions (`custom_ops`), and a plugin that has vLLM use ours (`plugin`)."""

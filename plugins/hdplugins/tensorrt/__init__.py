"""TensorRT plugins of hdexport's operators, which implement their `PluginSpec`."""

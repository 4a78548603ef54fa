"""What takes the place of the names of sentence-transformers that encoders of bundles lack."""

from __future__ import annotations

_TRAIN = "Train the checkpoint with sentence-transformers, and build it again: hdexport build CHECKPOINT -o BUNDLE"
_CHANGE = "A bundle's modules are fixed. Change the checkpoint, and build it again: hdexport build CHECKPOINT -o BUNDLE"
_ADAPTER = (
    "A bundle has its adapter in its weights, one bundle for each adapter: hdexport build CHECKPOINT --adapter NAME -o "
    "BUNDLE"
)
_WEIGHTS = (
    "A bundle's weights and modules are in graphs, which no tensors of PyTorch stand for. Load the checkpoint with "
    "sentence-transformers for them."
)
_SAVE = "The bundle is a directory: copy it, or publish it: hdexport push BUNDLE ORGANISATION/NAME"
_PROCESSES = (
    "One encoder uses all cores: encode all texts in one call. For several GPUs or machines: "
    "hdexport run BUNDLE TEXTS -o VECTORS --ray, or hdruntime.ray.RayPool"
)
_PRECISION = (
    "A bundle's precision is chosen as it is built (hdexport build --fp16, --bf16, or neither for float32), and on a "
    "CPU also as it is loaded: precision='bfloat16'. Results are float32."
)
_MANIFEST = "The sizes of the model: hdruntime.open_bundle(BUNDLE).manifest, or hdexport inspect BUNDLE"
_RUN = "hdruntime.load(BUNDLE) is called with arrays: session(**encoder.preprocess(texts))"
_DEVICE = (
    "The device is chosen as the bundle is loaded: device='cpu' or device='cuda'; any other by backend='openvino'."
)
_CARD = "The library needs it to save a checkpoint. A bundle's card is written by hdexport push."

REPLACEMENTS: dict[str, str] = {
    name: sentence
    for sentence, names in {
        _TRAIN: """fit get_sentence_features gradient_checkpointing_enable old_fit requires_grad_ smart_batching_collate
            smart_batching_collate_text_only zero_grad""",
        _CHANGE: """_first_module _last_module append extend insert keep_in_fp32_modules merge pop
            set_keep_in_fp32_modules set_pooling_include_prompt""",
        _ADAPTER: """active_adapter active_adapters add_adapter check_peft_compatible_model delete_adapter
            disable_adapters enable_adapters get_adapter_state_dict has_peft_compatible_model load_adapter
            set_adapter""",
        _WEIGHTS: """T_destination add_module apply buffers call_super_init children dump_patches extra_repr get_buffer
            get_extra_state get_parameter get_submodule load_state_dict model modules named_buffers named_children
            named_modules named_parameters parameters register_backward_hook register_buffer register_forward_hook
            register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
            register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
            register_state_dict_post_hook register_state_dict_pre_hook set_extra_state set_submodule smart_apply
            state_dict transformers_model""",
        _SAVE: "push_to_hub save save_pretrained save_to_hub",
        _PROCESSES: "encode_multi_process share_memory start_multi_process_pool stop_multi_process_pool",
        _PRECISION: "bfloat16 double dtype float half type",
        _MANIFEST: "config model_type",
        _RUN: "forward",
        _DEVICE: "_target_device clear_placement_cache ipu is_hpu_graph_enabled mtia to_empty xpu",
        _CARD: "default_huggingface_organization model_card_data_class",
        "The library's evaluators of sparse vectors read tensors of PyTorch. Evaluate the checkpoint with it; "
        "hdexport verify says how far the bundle's vectors are from that.": "evaluate",
        "The graph is compiled as the bundle is loaded; leave it out.": "compile",
        "The class loads: SentenceEncoder(BUNDLE), CrossEncoder(BUNDLE), ...": "load",
        "get_backend() names it.": "backend",
        "Code and settings of modules are read as the bundle is built: hdexport build --trust-remote-code": """
            get_model_kwargs module_kwargs trust_remote_code""",
        "isinstance(inputs, str) says whether there is one text.": "is_singular_input",
        "The attribute tokenizer is a bundle's only processor.": "processor",
        "The attribute activation_fn has it.": "default_activation_function get_default_activation_fn",
        "similarity_fn_name takes the functions that the class names under Attributes.": """
            SUPPORTED_SIMILARITY_FN_NAMES""",
        "Graphs for a CPU pool 256 tokens at a time; leave it out.": "splade_pooling_chunk_size",
    }.items()
    for name in names.split()
}
"""Name of an attribute or a method -> a sentence with what to use in its place."""

"""What differs between the releases of transformers, under one name each.

Facts are found by looking at the installed code, not at its version number, so that a backported
or a newer release is judged by what it does. Each has a test in `tests/contract/`.
"""

import inspect

from transformers import GenerationMixin
from transformers.cache_utils import DynamicLayer
from transformers.generation import utils as generation_utils
from transformers.modeling_layers import GradientCheckpointingLayer

#: The keyword for the cache in forwards, `generate()` and outputs: `cache` in 5.24, `past_key_values` before.
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

#: Both names a user may have used for it.
CACHE_KEYS = ("cache", "past_key_values")

#: 5.x runs the prompt through `_prefill`; 4.57 prepares `cache_position` and calls the model.
HAS_PREFILL = hasattr(GenerationMixin, "_prefill")

#: 5.x lets `prepare_inputs_for_generation` be told how many of the last ids to feed; 4.57 reads `cache_position`.
FEEDS_BY_LENGTH = "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

#: 5.x appends `num_new_tokens` to masks and positions at once; 4.57 appends one, and never to positions.
ADVANCES_BY_MANY = FEEDS_BY_LENGTH

#: Who prepares a forward, and the parameter that says for how many tokens.
PREPARES_BY = {
    "prepare_inputs_for_generation": "next_sequence_length" if FEEDS_BY_LENGTH else "cache_position",
    "_update_model_kwargs_for_generation": "num_new_tokens",
}

#: Whether position ids that the user gave go on with the text; 4.57 repeats the last one for ever.
ADVANCES_POSITIONS = ADVANCES_BY_MANY

#: The method that runs the encoder, with its input, the model kwargs and the input's name.
ENCODER_METHOD = next(
    name
    for name in (
        "_prepare_text_encoder_decoder_kwargs_for_generation",
        "_prepare_encoder_decoder_kwargs_for_generation",
    )
    if hasattr(GenerationMixin, name)
)

#: 5.x streams a token after the stopping criteria have seen it, 4.57 before.
STREAMS_AFTER_CRITERIA = hasattr(generation_utils, "StopCheck")

#: Inputs that say of each token what kind it is, and grow with the text.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")

#: Inputs with a row for each text.
ROW_INPUTS = ("attention_mask", "position_ids", *TOKEN_TYPES)

#: Whether this release masks several tokens behind a cache rightly in all its models, and draws no random numbers in
#: evaluation mode (LED's and SeamlessM4T's encoders did).
HAS_EVEN_FORWARDS = CACHE_KEY == "cache"

#: `crop(n)` of a cache with n above 0: up to 5.17 the length to keep, later an error.
CROPS_TO_LENGTH = "raise ValueError" not in inspect.getsource(DynamicLayer.crop)

#: `crop(0)`: in 4.57 nothing is kept, later nothing is removed.
CROPS_ALL_BY_ZERO = "max_length" in inspect.signature(DynamicLayer.crop).parameters

#: Whether layers drop the cache when a model is in training mode with gradient checkpointing, as long as no
#: gradients are asked for (5.24 keeps it then).
CHECKPOINTING_DROPS_CACHE = "is_grad_enabled" not in inspect.getsource(GradientCheckpointingLayer)

#: The host's decoding loops, each a method that `generate()` looks up on `type(model)`.
SAMPLE_METHOD = "_sample"

OTHER_DECODING_METHODS = {
    "_beam_search": "beam search",
    "_assisted_decoding": "Hugging Face's own assisted generation",
}

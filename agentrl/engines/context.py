"""Whether a model can read as far as an engine is asked to."""

from transformers import PreTrainedModel

from agentrl.errors import ConfigError


def check_positions(model: PreTrainedModel, context_tokens: int) -> None:
    """Raise ConfigError if the model knows fewer positions than the context has."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < context_tokens:
        raise ConfigError(
            f"engine.context_tokens ({context_tokens}) is more than the {positions} positions "
            f"that {type(model).__name__} knows: lower it"
        )

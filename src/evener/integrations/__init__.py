"""Adapters for models and training code written for other libraries, which stay unchanged.

::

    from evener.integrations.hf_outputs import logits, token_loss     models that take and return dictionaries
    from evener.integrations.transformers import Trainer                for transformers.Trainer; needs that library
"""

"""FT, fine-tuning: the lower bound. Nothing is done against forgetting.

The upper bound, Joint, is this method on the protocol `offline`, whose one step holds all classes.
"""

from methods.base import Method, register


@register("ft")
class FineTuning(Method):
    pass

"""An example: MiB with a backbone that stays as step 0 left it.

Copied into methods/ it is `method.name=my_method`. Head and classifiers go on learning, unless
`method.options.head=true` keeps the head as well.
"""

from typing import Any

from configs.registry import Settings
from methods.base import register
from methods.mib import MiB


@register("my_method")
class MyMethod(MiB):
    class Options(Settings):
        head: bool = False

    options: Options

    def freeze(self, model: Any) -> None:
        model.freeze(model.body)
        if self.options.head:
            model.freeze(model.head)

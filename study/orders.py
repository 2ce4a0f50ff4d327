"""Runs of one protocol with its classes in several orders (data.order): each order,
and mean and spread over them.
"""

import statistics

from study.cells import KEYS, means, name, row, show
from study.collection import Collection, order_of
from study.identity import Setting
from study.layouts import Section, Table
from study.settings import found
from study.spreads import spread


def table_orders(runs: Collection) -> Section:
    """Nothing unless there is more than one order."""
    title = "Orders of classes"
    orders = {order_of(runs.reference): runs} | runs.orders
    if len(orders) == 1:
        return Section("orders", title, [])
    ran = dict.fromkeys(setting for order in orders.values() for setting in found(order))
    settings = [setting for setting in ran if setting.method != "joint"]  # all at once have no order
    over = Table(
        "mIoU in percent after the last step, over orders of the classes",
        ["method", "orders", *KEYS],
        [row(setting, name(runs, setting), *_over_orders(orders, setting)) for setting in settings],
    )
    each = Table(
        "mIoU in percent after the last step, in each order",
        ["method", "order", "seeds", *KEYS],
        [
            row(setting, name(runs, setting), order, *means(collection, setting))
            for setting in settings
            for order, collection in orders.items()
            if setting in collection.cells
        ],
    )
    notes = [
        "Means over foreground classes: old are those that the order puts into step 0, so they differ from "
        "order to order.",
        "Over orders: mean ± standard deviation of the means over the seeds of each order. In each order: "
        "over seeds.",
    ]
    return Section("orders", title, [over, each], notes)


def _over_orders(orders: dict[str, Collection], setting: Setting) -> list[str]:
    """Return how many orders ran, and the metrics over them."""
    ran = [order for order in orders.values() if setting in order.cells]
    values = {key: [order.values(setting, key).values() for order in ran] for key in KEYS}
    return [
        str(len(ran)),
        *(show(spread(statistics.fmean(seeds) for seeds in values[key] if seeds)) for key in KEYS),
    ]

"""Labels of a Ray node: instance type, zone, market and code fingerprint."""

from ray_on_ecs.node import code, instance


def flags() -> list[str]:
    """Return the labels as an argument of `ray start`."""
    labels = {code.LABEL: code.fingerprint(), **instance.labels()}
    return [f"--labels={','.join(f'{label}={value}' for label, value in labels.items())}"]

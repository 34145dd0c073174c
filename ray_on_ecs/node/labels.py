"""The labels of a Ray node: what kind of instance it is on, and which code it runs."""

from ray_on_ecs.node import code, instance


def flags() -> list[str]:
    """Return the labels as an argument of `ray start`."""
    labels = {code.LABEL: code.fingerprint(), **instance.labels()}
    return [f"--labels={','.join(f'{label}={value}' for label, value in labels.items())}"]

"""RayCluster as a Pulumi package, for programs in other languages: `pulumi package add PATH_OF_THIS_FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

from pulumi.errors import InputPropertyError
from pulumi.provider import main
from pulumi.provider.experimental.component import ComponentProvider
from pulumi.provider.server import ComponentInitError

sys.path.append(str(Path(__file__).parents[1]))  # where infra/ and component/ are

from component.ray_cluster import RayCluster, describe
from infra.errors import Refusal


class Host(ComponentProvider):
    """Host that reports a refusal as an invalid property, in one line; Pulumi's own adds a traceback."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        schema = json.loads(self.schema or "")
        describe(schema)
        self.schema = json.dumps(schema)

    def construct(self, *args: Any, **options: Any) -> Any:
        """Construct the component."""
        try:
            return super().construct(*args, **options)
        except ComponentInitError as error:
            if isinstance(error.inner, Refusal):
                raise InputPropertyError(error.inner.subject, error.inner.text) from error
            raise


if __name__ == "__main__":
    # Pulumi's own default; the schema needs a version, and that of the package need not be a semantic one.
    main(Host([RayCluster], "ray-on-ecs", version="0.0.0"), sys.argv[1:])

"""RayCluster as a Pulumi package, for programs in other languages: `pulumi package add PATH_OF_THIS_FOLDER`."""

import sys
from pathlib import Path

from pulumi.provider.experimental import component_provider_host

sys.path.append(str(Path(__file__).parents[1]))  # where infra/ and component/ are

from component.ray_cluster import RayCluster
from ray_on_ecs import __version__

if __name__ == "__main__":
    component_provider_host(name="ray-on-ecs", components=[RayCluster], version=__version__)

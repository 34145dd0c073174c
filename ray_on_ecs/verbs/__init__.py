"""One module for each verb of `ray-on-ecs`; its `command` is what click runs."""

"""Files of the working directory that may hold a key of the user, by their names, and of some by their text."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress

from ray_on_ecs.run.code.ignore import Patterns

# Files and folders of keys, in small letters. `.envrc` is one: direnv reads tokens from it.
NAMES = """
    .ssh .azure .gnupg .kube .password-store .pulumi .ray-on-ecs .huggingface .kaggle
    **/.aws/credentials* **/.aws/config **/.aws/sso **/.aws/cli **/.docker/config.json
    **/.config/gcloud **/.config/gh **/.config/rclone **/.config/doctl **/.config/sops
    **/.config/git/credentials **/.config/pip/pip.conf **/.config/containers/auth.json
    **/.cache/huggingface/token **/.cache/huggingface/stored_tokens **/.cargo/credentials*
    **/.gem/credentials **/.m2/settings.xml **/.oci/config **/.pip/pip.conf
    **/.streamlit/secrets.toml .modal.toml .dockercfg .boto .s3cfg .passwd-s3fs .vault-token
    .netrc _netrc .pypirc .npmrc .git-credentials .pgpass .my.cnf .mylogin.cnf
    .htpasswd .databrickscfg .terraformrc credentials.tfrc.json credentials.json kaggle.json
    application_default_credentials.json client_secret*.json service-account*.json
    service_account*.json *.tfstate terraform.tfvars* *.auto.tfvars* .env* .flaskenv
    master.key private.key secret.key *.p8 *.p12 *.pfx *.ppk *.jks *.keystore
    *.kdbx id_rsa* id_dsa* id_ecdsa* id_ed25519* .*_history
    !*.py !*.pub !*example !*sample !*template
"""
ALWAYS = Patterns(NAMES.split())
# The text decides: a certificate is not a key, and a file of variables has not always a secret.
MAYBE = Patterns(("*.pem", "*.key", "*.env"))
TEXT = re.compile(
    rb"PRIVATE KEY|(?<![a-z])(?:api)?(?:key|key_id|token|secret|password|passwd|pass|pwd)[ \t]*=[ \t]*[^\s=]|://[^/\s]+@",
    re.IGNORECASE,
)
TEXT_BYTES = 64 * 2**10
# An editor's or a user's copy of a file.
COPY = re.compile(r"(?:~|\.(?:bak|backup|old|orig|save|swp))+$")


def may_hold_key(path: str, name: str, is_folder: bool) -> bool:
    """Return whether a file or a folder may hold a key; its name in the working directory is compared without case."""
    plain = COPY.sub("", name.lower())
    if ALWAYS.decide(plain, is_folder):
        return True
    if is_folder or not MAYBE.decide(plain, is_folder):
        return False
    with suppress(OSError):  # one that can't be read is refused later
        if stat.S_ISREG(os.lstat(path).st_mode):
            with open(path, "rb") as file:
                return TEXT.search(file.read(TEXT_BYTES)) is not None
    return False

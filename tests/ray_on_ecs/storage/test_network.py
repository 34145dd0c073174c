"""S3 through what lies between a laptop and AWS: proxies, certificates, endpoints, logins that end, and faults."""

import json
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster import aws
from ray_on_ecs.errors import TrainingError
from ray_on_ecs.storage import bucket as module
from ray_on_ecs.storage import disk, filesystem
from ray_on_ecs.storage.run_storage import RunStorage
from tests import flaky_s3
from tests.aws import BUCKET
from tests.flaky_s3 import FlakyProxy
from tests.serving import serving

PAGE = b"<!DOCTYPE html><html><body>Sign in to the network</body></html>"
PIECE = 5 * 2**20  # S3's smallest part


Answer = tuple[int, dict[str, str], bytes]


class Front(FlakyProxy):
    """Forwards to S3, or gives an answer of the test; also a proxy for other hosts.

    Attributes:
        answer: Returns status, headers and body for a request, or None to forward it.
        seen: Method and path of each request, with the host that a proxy is asked for.
        keys: The access key of each request.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target, 0.0)
        self.RequestHandlerClass = Handler
        self.answer: Callable[[BaseHTTPRequestHandler], Answer | None] = lambda _: None
        self.seen: list[str] = []
        self.keys: list[str] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop what clients close."""


class Handler(flaky_s3.Handler):
    def do_CONNECT(self) -> None:
        """Connect to the only HTTPS server of the test, whose port the name has."""
        front = cast(Front, self.server)
        front.seen.append(f"CONNECT {self.path}")
        with socket.create_connection(("127.0.0.1", int(self.path.rpartition(":")[2]))) as there:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_pump, args=(there, self.connection), daemon=True)
            back.start()
            _pump(self.connection, there)
            back.join()
        self.close_connection = True

    def forward(self) -> None:
        front = cast(Front, self.server)
        front.seen.append(f"{self.command} {self.path}")
        if found := re.search(r"Credential=(\w+)/", self.headers.get("Authorization", "")):
            front.keys.append(found[1])
        answer = front.answer(self)
        if answer is None:
            self.path = re.sub("^http://[^/]+", "", self.path)
            self.headers.replace_header("Host", front.target)
            super().forward()
            return
        self._body()
        status, headers, content = answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@contextmanager
def secure(target: str, folder: Path) -> Generator[tuple[Front, Path]]:
    """Serve S3 by TLS for `localhost`; yields the server and the file of its private CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a company's CA")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    ca, private = folder / "ca.pem", folder / "key.pem"
    ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca, private)
    front = Front(target)
    front.socket = context.wrap_socket(front.socket, server_side=True, do_handshake_on_connect=False)
    with serving(front):
        yield front, ca


class Laptop:
    """The environment of a command, and a run in the bucket.

    Attributes:
        front: What answers in the place of S3.
        folder: For files of the test.
        address: The storage path.
    """

    def __init__(self, front: Front, folder: Path, address: str, patch: pytest.MonkeyPatch) -> None:
        self.front, self.folder, self.address, self._patch = front, folder, address, patch

    def set(self, **variables: str | None) -> None:
        for name, value in variables.items():
            self._patch.setenv(name, value) if value is not None else self._patch.delenv(name, raising=False)

    def configure(self, text: str) -> None:
        """Write ~/.aws/config."""
        (self.folder / "config").write_text(text)
        self.set(AWS_CONFIG_FILE=str(self.folder / "config"))

    def check(self) -> None:
        """List, write, fetch and copy, each through the same door."""
        assert main(["runs", "--local"]) == 0
        assert main(["fetch", "--local", "first", str(self.folder / "fetched")]) == 0
        assert (self.folder / "fetched/first/files/a.txt").read_text() == "content of files/a.txt"
        storage = RunStorage.open(self.address, "first")
        storage.check_writable()
        content = bytes(range(256)) * (2 * PIECE // 256) + b"end"
        with storage.open_writer("large") as stream:
            stream.write(content)
        target = self.folder / "copy"
        location = storage.find("large")
        assert location
        filesystem.copy_to_disk(storage.store, {target: location})
        assert target.read_bytes() == content


@pytest.fixture
def laptop(
    aws_server: str, s3_client: Any, aws_variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Laptop]:
    for name, value in {**aws_variables, "HOME": str(tmp_path), "NO_PROXY": "", "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "AWS_PROFILE", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for part in (module, filesystem, disk):
        monkeypatch.setattr(part, "PIECE_BYTES", PIECE)
    address = f"s3://{BUCKET}/{tmp_path.name}"
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", address)
    monkeypatch.chdir(tmp_path)
    from tests.ray_on_ecs.cli.folders import Folders

    folders = Folders(address)
    folders.status("first", "finished")
    folders.script("first", is_finished=False)
    folders.files("first", "a.txt")
    with serving(Front(aws_server)) as front:
        yield Laptop(front, tmp_path, address, monkeypatch)


def test_endpoint_of_s3_wins(laptop: Laptop) -> None:
    laptop.set(AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_ENDPOINT_URL_S3=laptop.front.url)
    laptop.check()


def test_endpoint_of_a_profile(laptop: Laptop) -> None:
    laptop.configure(f"[profile work]\nregion = eu-west-3\nendpoint_url = {laptop.front.url}\n")
    laptop.set(AWS_PROFILE="work", AWS_ENDPOINT_URL=None, AWS_REGION=None, AWS_DEFAULT_REGION=None)
    laptop.check()


def test_endpoint_of_a_services_section(laptop: Laptop) -> None:
    laptop.configure(f"[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = {laptop.front.url}\n")
    laptop.set(AWS_ENDPOINT_URL=None)
    laptop.check()


def test_endpoint_by_name_is_addressed_by_path(laptop: Laptop) -> None:
    laptop.set(AWS_ENDPOINT_URL=laptop.front.url.replace("127.0.0.1", "localhost"))
    laptop.check()
    assert all(each.split()[1].startswith(f"/{BUCKET}") for each in laptop.front.seen)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy"])
def test_all_requests_pass_the_proxy(laptop: Laptop, variable: str) -> None:
    laptop.set(AWS_ENDPOINT_URL="http://s3.company.invalid", **{variable: laptop.front.url})
    if variable == "HTTP_PROXY":
        laptop.set(http_proxy=laptop.front.url)  # CGI's rule: Python ignores the capitals beside REQUEST_METHOD
    laptop.check()
    assert laptop.front.seen
    assert all("http://s3.company.invalid/" in each for each in laptop.front.seen)


def test_no_proxy_is_heeded(laptop: Laptop) -> None:
    laptop.set(http_proxy="http://127.0.0.1:9", no_proxy="127.0.0.1", AWS_ENDPOINT_URL=laptop.front.url)
    laptop.check()


@pytest.mark.parametrize("place", ["variable", "profile"])
def test_private_certificates_and_a_proxy(laptop: Laptop, aws_server: str, place: str) -> None:
    with secure(aws_server, laptop.folder) as (front, ca):
        laptop.set(AWS_ENDPOINT_URL=f"https://localhost:{front.server_port}", https_proxy=laptop.front.url)
        if place == "variable":
            laptop.set(AWS_CA_BUNDLE=str(ca))
        else:
            laptop.configure(f"[default]\nca_bundle = {ca}\n")
        laptop.check()
    assert set(laptop.front.seen) == {f"CONNECT localhost:{front.server_port}"}


@pytest.mark.parametrize("kind", ["process", "assumed role"])
def test_login_ends_while_a_file_is_copied(laptop: Laptop, kind: str) -> None:
    """Each request asks for the login again, as its keys end soon."""
    script = laptop.folder / "login.py"
    script.write_text(
        "import datetime, json, pathlib\n"
        f"log = pathlib.Path({str(laptop.folder / 'logins')!r})\n"
        "log.write_text((log.read_text() if log.exists() else '') + 'x')\n"
        "end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'KEY' + str(len(log.read_text())), 'SecretAccessKey': 's',\n"
        "    'SessionToken': 't', 'Expiration': end.isoformat()}))\n"
    )
    laptop.set(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None, AWS_ENDPOINT_URL=laptop.front.url)
    process = f"credential_process = {sys.executable} {script}\n"
    if kind == "process":
        laptop.configure(f"[default]\n{process}")
    else:
        role = "role_arn = arn:aws:iam::123456789012:role/train\nduration_seconds = 900\nsource_profile = base\n"
        laptop.configure(f"[default]\n{role}[profile base]\n{process}")
    storage = RunStorage.open(laptop.address, "first")
    content = b"0123456789abcdef" * (3 * PIECE // 16)
    laptop.front.keys.clear()
    with storage.open_writer("large") as stream:
        stream.write(content)
    location = storage.find("large")
    assert location
    filesystem.copy_to_disk(storage.store, {laptop.folder / "copy": location})
    assert (laptop.folder / "copy").read_bytes() == content
    assert len(set(laptop.front.keys)) > 1


def test_wrong_region_is_corrected(laptop: Laptop) -> None:
    def redirect(handler: BaseHTTPRequestHandler) -> Answer | None:
        if "/eu-west-3/s3/" in handler.headers.get("Authorization", ""):
            return None
        body = b"<Error><Code>PermanentRedirect</Code><Message>elsewhere</Message></Error>"
        return 301, {"x-amz-bucket-region": "eu-west-3", "Content-Type": "application/xml"}, body

    laptop.front.answer = redirect
    laptop.set(AWS_ENDPOINT_URL=laptop.front.url, AWS_REGION="us-west-2", AWS_DEFAULT_REGION="us-west-2")
    laptop.check()


def test_truncated_answers_are_read_again(laptop: Laptop) -> None:
    cut = []

    def truncate(handler: BaseHTTPRequestHandler) -> Answer | None:
        if handler.command == "GET" and "status.json" in handler.path and len(cut) < 2:
            cut.append(handler.path)
            handler.close_connection = True
            return 200, {"Content-Length": "100", "ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, b"{"
        return None

    laptop.front.answer = truncate
    laptop.set(AWS_ENDPOINT_URL=laptop.front.url)
    assert RunStorage.open(laptop.address, "first").read_json("status.json")["state"] == "finished"
    assert len(cut) == 2


def error(code: str, status: int = 403) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    return status, {"Content-Type": "application/xml"}, body


ANSWERS = {
    "page": ((200, {"Content-Type": "text/html"}, PAGE), 3, "not an answer of AWS.*portal that wants a login"),
    "page without a type": ((200, {}, PAGE), 3, "not an answer of AWS"),
    "page that is XML": ((200, {"Content-Type": "text/html"}, b"<html><body/></html>"), 3, "not an answer of AWS"),
    "refused by a page": ((403, {"Content-Type": "text/html"}, PAGE), 3, "not an answer of AWS"),
    "page of a gateway": ((502, {"Content-Type": "text/html"}, PAGE), 3, "not an answer of AWS"),
    "empty": ((200, {}, b""), 3, f"s3://{BUCKET}.*not an answer of AWS"),
    "text": ((200, {"Content-Type": "text/plain"}, b"hello"), 3, f"s3://{BUCKET}.*Internal Server Error"),
    "denied": (error("AccessDenied"), 3, f"s3://{BUCKET}.*AccessDenied.*ask for access.*AWS_PROFILE"),
    "no bucket": (error("NoSuchBucket", 404), 2, f"bucket {BUCKET} does not exist.*RAY_ON_ECS_STORAGE_PATH"),
    "expired": (error("ExpiredToken", 400), 2, "credentials are missing or expired .*aws sso login"),
    "unknown key": (error("InvalidAccessKeyId"), 2, "credentials are missing or expired"),
    "wrong secret": (error("SignatureDoesNotMatch"), 2, "credentials are missing or expired"),
    "clock": (error("RequestTimeTooSkewed"), 2, "clock is wrong; set its time"),
    "slow down": (error("SlowDown", 503), 3, f"s3://{BUCKET}.*SlowDown"),
    "fault": (error("InternalError", 500), 3, f"s3://{BUCKET}.*InternalError"),
    "redirect to a portal": (
        (302, {"Location": "http://portal/login"}, b""),
        3,
        "not an answer .*302 to http://portal/",
    ),
    "redirect to nowhere": (error("PermanentRedirect", 301), 3, "not an answer of AWS.*HTTP 301"),
}


def is_one_line(capsys: pytest.CaptureFixture[str], status: int, text: str) -> None:
    """The commands that read runs, and doctor's check, say the same."""
    for command in (["runs"], ["fetch", "first"], ["rm", "first"]):
        capsys.readouterr()
        assert main([command[0], "--local", *command[1:]]) == status, command
        [line] = capsys.readouterr().err.splitlines()
        assert re.search(text, line), line
        assert line.startswith("ray-on-ecs: ")


@pytest.mark.parametrize("kind", ANSWERS)
def test_answer_of_others_is_one_line(
    laptop: Laptop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    answer, status, text = ANSWERS[kind]
    monkeypatch.setattr(aws, "ATTEMPTS", 1)
    laptop.set(AWS_ENDPOINT_URL=laptop.front.url)
    laptop.front.answer = lambda _: answer
    is_one_line(capsys, status, text)
    storage = RunStorage.open(laptop.address, "first", attempts=1)
    with pytest.raises(TrainingError, match="--storage-path") as caught:
        storage.check_writable()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["denied", "no bucket", "expired", "unknown key"])
def test_permanent_error_is_not_retried(laptop: Laptop, kind: str) -> None:
    laptop.set(AWS_ENDPOINT_URL=laptop.front.url)
    laptop.front.answer = lambda _: ANSWERS[kind][0]
    with pytest.raises(TrainingError, match="--storage-path"):
        RunStorage.open(laptop.address, "first").check_writable()
    assert len(laptop.front.seen) <= 3, laptop.front.seen


def silent(laptop: Laptop, undo: ExitStack) -> None:
    listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
    laptop.set(AWS_ENDPOINT_URL=f"http://127.0.0.1:{listener.getsockname()[1]}")


def proxy_is_gone(laptop: Laptop, _: ExitStack) -> None:
    laptop.set(AWS_ENDPOINT_URL=laptop.front.url, http_proxy="http://user:secret@127.0.0.1:9")


def untrusted(laptop: Laptop, undo: ExitStack) -> None:
    front, _ = undo.enter_context(secure(f"http://{laptop.front.target}", laptop.folder))
    laptop.set(AWS_ENDPOINT_URL=f"https://localhost:{front.server_port}")


def no_tls(laptop: Laptop, _: ExitStack) -> None:
    laptop.set(AWS_ENDPOINT_URL=laptop.front.url.replace("http:", "https:"))


def no_certificates(laptop: Laptop, _: ExitStack) -> None:
    laptop.set(AWS_ENDPOINT_URL=laptop.front.url.replace("http:", "https:"), AWS_CA_BUNDLE="/nowhere/ca.pem")


def broken_configuration(laptop: Laptop, _: ExitStack) -> None:
    laptop.configure("[default\nregion")


LOGIN = "credentials are missing or expired .*aws sso login or set AWS_PROFILE"
NO_KEYS: dict[str, str | None] = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
SSO = "sso_account_id = 123456789012\nsso_role_name = train\nsso_session = mine\n"
SSO += "[sso-session mine]\nsso_start_url = https://x\nsso_region = us-east-1\n"
# Each with what causes it: variables, the rest of the default profile of a laptop without keys, or a function.
FAULTS: dict[str, tuple[dict[str, str | None] | str | Callable[[Laptop, ExitStack], None], int, str]] = {
    "connection refused": (
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
        3,
        f"s3://{BUCKET}.*can't be reached .*127.0.0.1:9.*HTTPS_PROXY",
    ),
    "unknown host": ({"AWS_ENDPOINT_URL": "http://s3.company.invalid"}, 3, "can't be reached .*s3.company.invalid"),
    "silent server": (silent, 3, "can't be reached .*timeout"),
    "no proxy there": (proxy_is_gone, 3, "the proxy can't be reached .*NO_PROXY"),
    "untrusted certificate": (untrusted, 3, "certificate is not trusted .*AWS_CA_BUNDLE"),
    "HTTP in place of HTTPS": (no_tls, 3, "certificate is not trusted .*AWS_CA_BUNDLE"),
    "no certificates": (no_certificates, 3, "No such file.*AWS_CA_BUNDLE"),
    "endpoint without a scheme": ({"AWS_ENDPOINT_URL": "s3.company.com"}, 2, "s3.company.com"),
    "no profile": ({"AWS_PROFILE": "absent-profile"}, 2, f"absent-profile.*|{LOGIN}"),
    "no credentials": (NO_KEYS, 2, LOGIN),
    "half of the credentials": ({"AWS_SECRET_ACCESS_KEY": None}, 2, LOGIN),
    "failing process": ("credential_process = false\n", 2, LOGIN),
    "missing process": ("credential_process = /nowhere/login\n", 2, f"{LOGIN}|/nowhere/login"),
    "process without JSON": ("credential_process = echo hello\n", 2, "configuration is broken .*~/.aws/config"),
    "SSO without a login": (SSO, 2, LOGIN),
    "broken configuration": (broken_configuration, 2, "configuration is broken"),
    "invalid region": (
        {"AWS_REGION": "eu west 3", "AWS_DEFAULT_REGION": "eu west 3", "AWS_ENDPOINT_URL": None},
        2,
        "eu west 3",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_fault_of_network_or_login_is_one_line(
    laptop: Laptop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cause, status, text = FAULTS[kind]
    monkeypatch.setattr(aws, "ATTEMPTS", 1)
    if cause is silent:
        monkeypatch.setattr(aws, "READ_SECONDS", 0.5)
    with ExitStack() as undo:
        if isinstance(cause, dict):
            laptop.set(**cause)
        elif isinstance(cause, str):
            laptop.set(**NO_KEYS)
            laptop.configure(f"[default]\n{cause}")
        else:
            cause(laptop, undo)
        is_one_line(capsys, status, text)
    assert "secret" not in json.dumps(capsys.readouterr().err)

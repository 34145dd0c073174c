"""Objects in S3 by boto3: lists, ranged reads, uploads by parts and conditional writes.

boto3 repeats a call whose answer is lost. What it cannot repeat is repeated here: the content of an answer, and the end
of an upload by parts, which may have succeeded.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from uuid import uuid4

from ray_on_ecs import aws
from ray_on_ecs.errors import ResourceError, TrainingError, UsageError
from ray_on_ecs.storage.disk import PIECE_BYTES, Changed, Listing, StoredFile

# With a backoff up to 20 s, enough for a minute without S3.
MAX_ATTEMPTS = 12
READ_ATTEMPTS = 5
# Parts of one upload under way, each in memory.
PARTS_AT_ONCE = 6
# An upload has at most 10,000 parts, so that they become larger: the limit of 5 TiB is reached before.
PARTS_OF_A_SIZE = 1000
# CopyObject's limit: https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
MAX_COPY_BYTES = 5 * 2**30
MISSING = ("NoSuchKey", "NoSuchUpload", "404")
DENIED = ("AccessDenied", "AllAccessDisabled", "403")
NOT_THIS_VERSION = ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "412")


class StorageFault(OSError):
    """S3's error, or none of its answers; `error` is the same as an error of a command."""

    def __init__(self, error: TrainingError) -> None:
        super().__init__(str(error))
        self.error = error


class Missing(StorageFault, FileNotFoundError):
    """An object does not exist."""


class NoBucket(StorageFault):
    """A bucket does not exist."""


class Bucket:
    """Objects in S3; a path is `bucket/key`. `options` are those of `aws.client`."""

    def __init__(self, attempts: int | None = None, **options: Any) -> None:
        self.client = aws.client("s3", attempts=attempts or MAX_ATTEMPTS, **options)
        self._attempts = attempts
        self._options = options

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a client in the other process: connections can't be sent."""
        return partial(Bucket, self._attempts, **self._options), ()

    def with_limits(self, seconds: float, attempts: int) -> Bucket:
        """Return the same with other timeouts and attempts."""
        return Bucket(attempts, **{**self._options, "connect_seconds": seconds, "read_seconds": seconds})

    def find(self, path: str) -> StoredFile | None:
        """Return an object, or None if it does not exist."""
        try:
            head = self.call("head_object", path)
        except FileNotFoundError:
            return None
        return StoredFile(path, head["ContentLength"], _ns(head["LastModified"]), head["ETag"])

    def age(self, path: str) -> tuple[str, float]:
        """Return the version of an object, and the seconds since it was written by S3's clock; "" and 0 without one."""
        try:
            head = self.call("head_object", path)
        except FileNotFoundError:
            return "", 0.0
        date = head["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = parsedate_to_datetime(date).timestamp() if date else 0.0
        return head["ETag"], max(now - head["LastModified"].timestamp(), 0.0)

    def listing(self, path: str, *, recursive: bool = False) -> Listing:
        """List a folder, or all objects below it."""
        bucket, prefix = _folder(path)
        found = Listing()
        now = 0.0
        for page in self._pages(bucket, prefix, {} if recursive else {"Delimiter": "/"}):
            for item in page.get("Contents", ()):
                name = item["Key"][len(prefix) :]
                if name and (item["Size"] or not name.endswith("/")):  # S3's console marks folders by empty objects
                    modified = _ns(item["LastModified"])
                    found.files[name] = StoredFile(f"{bucket}/{item['Key']}", item["Size"], modified, item["ETag"])
            found.folders.extend(each["Prefix"][len(prefix) : -1] for each in page.get("CommonPrefixes", ()))
            if not now and (date := page["ResponseMetadata"]["HTTPHeaders"].get("date")):
                now = parsedate_to_datetime(date).timestamp()
        return Listing(found.files, found.folders, now)

    def read(self, path: str, start: int = 0, size: int | None = None, version: str = "") -> bytes:
        """Read an object, or a part of it that is not empty; Changed if it has another version."""
        arguments = {"Range": f"bytes={start}-{'' if size is None else start + size - 1}"} if start or size else {}
        if version:
            arguments["IfMatch"] = version
        attempt = 0
        while True:
            attempt += 1
            try:
                response = self.call("get_object", path, **arguments)
            except StorageFault as cause:
                if _code(cause.error) in ("PreconditionFailed", "InvalidRange", "412", "416"):
                    raise Changed(f"s3://{path}") from cause
                raise
            try:
                with _translated(path):
                    return response["Body"].read()
            except StorageFault:
                if attempt == READ_ATTEMPTS:
                    raise
                time.sleep(2**attempt / 10)

    def open_reader(self, path: str) -> io.RawIOBase:
        """Open an object for random access: each read is a request."""
        info = self.find(path)
        if info is None:
            raise FileNotFoundError(f"s3://{path} does not exist")
        return _Reader(self, info)

    @contextmanager
    def writing(self, path: str) -> Generator[Upload]:
        """Write an object, which appears as soon as it is complete, and not if the block fails."""
        upload = Upload(self, path)
        try:
            yield upload
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def write_if(self, path: str, content: bytes, version: str | None) -> str | None:
        """Write an object if it has this version, None for a missing one.

        Returns the new version; None if it had another one, or if the answer to a successful write was lost.
        """
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            return self.call("put_object", path, Body=content, **condition)["ETag"]
        except StorageFault as cause:
            if _code(cause.error) in NOT_THIS_VERSION:
                return None
            raise

    def read_version(self, path: str) -> tuple[str | None, bytes]:
        """Return the version of an object and its content; None for a missing one."""
        while True:
            info = self.find(path)
            if info is None:
                return None, b""
            with suppress(Changed, FileNotFoundError):
                return info.version, self.read(path, version=info.version)

    def copy(self, source: StoredFile, target: str) -> None:
        """Copy an object within S3."""
        bucket, _, key = source.path.partition("/")
        is_large = source.size > MAX_COPY_BYTES  # the first is one request, the second many
        self.call("copy" if is_large else "copy_object", target, CopySource={"Bucket": bucket, "Key": key})

    def delete(self, path: str) -> None:
        """Delete an object if it exists."""
        self.call("delete_object", path)

    def delete_folder(self, path: str) -> None:
        """Delete all objects below a path."""
        bucket, prefix = _folder(path)
        for page in self._pages(bucket, prefix, {}):
            if keys := [{"Key": item["Key"]} for item in page.get("Contents", ())]:
                answer = self.call("delete_objects", bucket, Delete={"Objects": keys, "Quiet": True})
                for error in answer.get("Errors", ()):
                    raise OSError(f"s3://{bucket}/{error['Key']} can't be deleted ({error['Code']})")

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        """Call S3 for a bucket, or for an object; OSError if it is missing, access is denied, or S3 doesn't answer."""
        bucket, _, key = path.partition("/")
        if key:
            arguments["Key"] = key
        with _translated(path):
            return getattr(self.client, method)(Bucket=bucket, **arguments)

    def _pages(self, bucket: str, prefix: str, arguments: Mapping[str, str]) -> Iterator[Any]:
        with _translated(bucket):
            yield from self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **arguments)


class _Reader(io.RawIOBase):
    """Object for random access."""

    def __init__(self, bucket: Bucket, info: StoredFile) -> None:
        self._bucket, self._info, self._position = bucket, info, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._info.size}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        rest = self._info.size - self._position
        size = rest if size is None or size < 0 else min(size, rest)
        content = self._bucket.read(self._info.path, self._position, size) if size > 0 else b""
        self._position += len(content)
        return content

    def readinto(self, buffer: Any, /) -> int:
        content = self.read(memoryview(buffer).nbytes)
        memoryview(buffer).cast("B")[: len(content)] = content
        return len(content)


class Upload:
    """Stream into an object: one request for a small one, and else parts, several at once."""

    def __init__(self, bucket: Bucket, path: str) -> None:
        self._bucket, self._path = bucket, path
        self._buffer = bytearray()
        self._token = uuid4().hex  # in the object's metadata: it tells whether this upload has succeeded
        self._id: str | None = None
        self._parts: list[Future[dict[str, Any]]] = []
        self._threads = ThreadPoolExecutor(PARTS_AT_ONCE)  # which starts threads when there are parts

    def write(self, data: Any, /) -> int:
        """Append bytes."""
        rest = memoryview(data).cast("B")
        written = len(rest)
        while rest:
            room = self._part_bytes - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            if len(self._buffer) == self._part_bytes:
                self._send()
        return written

    def finish(self) -> None:
        """Make the object; OSError if S3 refuses, or doesn't answer."""
        if self._id is None:
            self._bucket.call("put_object", self._path, Body=self._buffer)
            return
        if self._buffer:
            self._send()
        parts = {"Parts": [part.result() for part in self._parts]}
        try:
            self._bucket.call("complete_multipart_upload", self._path, UploadId=self._id, MultipartUpload=parts)
        except FileNotFoundError:  # an earlier request has succeeded, and its answer was lost
            if self._bucket.call("head_object", self._path)["Metadata"].get("upload") != self._token:
                raise

    def abort(self) -> None:
        """Drop the parts."""
        self._threads.shutdown(cancel_futures=True)
        if self._id is not None:
            with suppress(OSError):
                self._bucket.call("abort_multipart_upload", self._path, UploadId=self._id)

    @property
    def _part_bytes(self) -> int:
        return PIECE_BYTES << (len(self._parts) // PARTS_OF_A_SIZE)

    def _send(self) -> None:
        """Upload the buffer as a part, once at most so many others are under way."""
        if self._id is None:
            arguments: dict[str, Any] = {"Metadata": {"upload": self._token}}
            if self._bucket.client.meta.config.request_checksum_calculation == "when_supported":
                arguments["ChecksumAlgorithm"] = "CRC32"
            self._id = self._bucket.call("create_multipart_upload", self._path, **arguments)["UploadId"]
        if len(self._parts) >= PARTS_AT_ONCE:
            self._parts[-PARTS_AT_ONCE].result()
        self._parts.append(self._threads.submit(self._send_part, len(self._parts) + 1, self._buffer))
        self._buffer = bytearray()

    def _send_part(self, number: int, content: bytearray) -> dict[str, Any]:
        answer = self._bucket.call("upload_part", self._path, UploadId=self._id, PartNumber=number, Body=content)
        checksum = {"ChecksumCRC32": answer["ChecksumCRC32"]} if "ChecksumCRC32" in answer else {}
        return {"PartNumber": number, "ETag": answer["ETag"], **checksum}


def _folder(path: str) -> tuple[str, str]:
    """Return the bucket and the prefix of a folder's objects."""
    bucket, _, key = path.partition("/")
    return bucket, f"{key}/" if key else ""


def _code(error: TrainingError) -> str:
    """Return AWS's error code; empty if it was another fault."""
    return error.code if isinstance(error, aws.Refused) else ""


@contextmanager
def _translated(path: str) -> Generator[None]:
    """Translate boto3's errors in this block into StorageFault."""
    try:
        yield
    except Exception as cause:
        error = aws.explain(cause, f"s3://{path}")
        if error is None:
            raise
        code = _code(error)
        if code in MISSING:
            raise Missing(error) from cause
        if code == "NoSuchBucket":
            missing = f"bucket {path.partition('/')[0]} does not exist; correct its name, or create it"
            raise NoBucket(UsageError(missing)) from cause
        if code in DENIED:
            error = ResourceError(f"{error}; ask for access to this bucket, or set AWS_PROFILE")
        raise StorageFault(error) from cause


def _ns(moment: Any) -> int:
    return int(moment.timestamp()) * 10**9

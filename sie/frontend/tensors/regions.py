"""Keeps the regions of clients' POSIX shared memory, and copies tensors out of them and into them.

All frontends of a server see a region as soon as it is registered: the registry is a folder of the server's private
runtime directory with one file for each region. A region belongs to the API key that registered it; other keys have
regions of their own. A region is never mapped, since its client may shrink it, and an access beyond its end would kill
this process: bytes are copied with pread and pwrite. Each use opens the object again and checks that it is the same.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from sie.config.limits import Limits
from sie.values.errors import BadRequest, NotFound, Overloaded, SieError
from sie.values.tensor import RegionPart, Tensor, TensorReply, TensorRequest

_SHM: Final = "/dev/shm"  # noqa: S108  # where the C library keeps POSIX shared memory
_KEY: Final = re.compile(r"/?([^/\0]{1,255})")
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_NAME_CHARS: Final = 256
_EMPTY: Final = memoryview(b"")


class Region(msgspec.Struct, frozen=True):
    """A registered region: byte_size bytes from offset of the object `key`; place is its device and inode."""

    name: str
    key: str
    offset: int
    byte_size: int
    owner: str
    place: tuple[int, int]

    def shown(self) -> dict[str, str | int]:
        """Return the region as the protocol shows it."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}


_decoder: Final = msgspec.json.Decoder(Region)


class Regions:
    """The registered regions of one server, and their bytes. owner is the name of an API key, empty without keys."""

    def __init__(self, folder: Path, limits: Callable[[], Limits], shm: str = _SHM) -> None:
        """Keep regions in a folder that all frontends of a server share. The first registration makes it."""
        self._folder = folder
        self._limits = limits
        self._shm = shm
        self._held_bytes = 0

    def register(self, owner: str, region: RegionPart, key: str) -> None:
        """Register a region under a name.

        Raises SieError if regions are off, and BadRequest for a taken name, an object that cannot be used, a range
        outside of it, or too many regions.
        """
        limits = self._limits()
        if not limits.max_client_regions:
            raise _off()
        if not region.name or len(region.name) > _MAX_NAME_CHARS:
            raise BadRequest(f"the name of a region has 1 to {_MAX_NAME_CHARS} characters")
        if region.nbytes > limits.max_client_region_bytes:
            raise BadRequest(f"byte_size is over max_client_region_bytes ({limits.max_client_region_bytes})")
        with self._opened(key) as (_, found):
            if region.nbytes < 1 or region.offset + region.nbytes > found.st_size:
                raise BadRequest(
                    f"failed to register shared memory region '{region.name}': offset {region.offset} and byte_size "
                    f"{region.nbytes} exceed its {found.st_size} bytes"
                )
        if len(self.all_of(owner)) >= limits.max_client_regions:
            raise BadRequest(f"too many shared memory regions: max_client_regions is {limits.max_client_regions}")
        place = found.st_dev, found.st_ino
        self._save(Region(region.name, key, region.offset, region.nbytes, owner, place))

    def _save(self, region: Region) -> None:
        path = self._path(region.owner, region.name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_bytes(msgspec.json.encode(region))
        try:
            os.link(new, path)  # unlike a rename, it fails if another frontend has registered the name
        except FileExistsError:
            raise BadRequest(f"shared memory region '{region.name}' already in manager") from None
        finally:
            new.unlink()

    def unregister(self, owner: str, name: str = "") -> None:
        """Forget a region, or all regions of this owner. Does nothing for a region that is not registered."""
        paths = [self._path(owner, name)] if name else [self._path(owner, each.name) for each in self.all_of(owner)]
        for path in paths:
            path.unlink(missing_ok=True)

    def all_of(self, owner: str) -> list[Region]:
        """Return the regions of an owner, by name."""
        found: list[Region] = []
        for path in self._folder_of(owner).glob("*.json"):
            with suppress(FileNotFoundError):  # unregistered meanwhile
                found.append(_decoder.decode(path.read_bytes()))
        return sorted(found, key=lambda region: region.name)

    def find(self, owner: str, name: str) -> Region:
        """Return a region. Raises NotFound, also for a region that was registered before regions were turned off."""
        unknown = NotFound(f"Unable to find shared memory region: '{name[:_MAX_NAME_CHARS]}'")
        if not self._limits().max_client_regions:
            raise unknown
        try:
            return _decoder.decode(self._path(owner, name).read_bytes())
        except FileNotFoundError:
            raise unknown from None

    @contextmanager
    def holding(self, num_bytes: int) -> Generator[None]:
        """Count the bytes of a request's inputs while it runs. Raises Overloaded over max_held_bytes in this process.

        A request of a few bytes can name large regions, so those of all requests together need a limit.
        """
        limit = self._limits().max_held_bytes
        if self._held_bytes + num_bytes > limit:
            text = f"the inputs in shared memory of running requests are over max_held_bytes ({limit})"
            raise Overloaded(text, retry_after_s=1)
        self._held_bytes += num_bytes
        try:
            yield
        finally:
            self._held_bytes -= num_bytes

    def filled(self, owner: str, request: TensorRequest) -> TensorRequest:
        """Return a request whose inputs in regions have their bytes. Raises NotFound, BadRequest."""
        nbytes, limit = request.region_bytes, self._limits().max_body_bytes
        if nbytes > limit:
            raise BadRequest(f"the inputs in shared memory have {nbytes} bytes, over max_body_bytes ({limit})")
        inputs = [
            msgspec.structs.replace(tensor, data=self._read(owner, tensor.part), part=None) if tensor.part else tensor
            for tensor in request.inputs
        ]
        for part in request.stores.values():
            self._check_range(self.find(owner, part.name), part)  # before the model runs
        return msgspec.structs.replace(request, inputs=inputs)

    def stored(self, owner: str, request: TensorRequest, reply: TensorReply) -> TensorReply:
        """Write the outputs that the request wants in regions, and return the reply without their bytes.

        Raises NotFound, and BadRequest if an output is larger than its part of the region.
        """
        outputs: list[Tensor] = []
        for output in reply.outputs:
            part = request.stores.get(output.name)
            if part is not None:
                nbytes = len(output.data)
                if nbytes > part.nbytes:
                    raise BadRequest(
                        f"shared memory size specified with the request for output '{output.name}' should be at least "
                        f"{nbytes} bytes to hold the results"
                    )
                self._write(owner, part, output.data)
                kept = RegionPart(part.name, part.offset, nbytes)
                output = Tensor(output.name, output.datatype, output.shape, _EMPTY, kept)  # noqa: PLW2901
            outputs.append(output)
        return msgspec.structs.replace(reply, outputs=outputs)

    def _read(self, owner: str, part: RegionPart) -> memoryview:
        region = self.find(owner, part.name)
        self._check_range(region, part)
        buffer = bytearray(part.nbytes)
        with self._opened(region.key, region) as (fd, _):
            if _copy(os.preadv, fd, memoryview(buffer), region.offset + part.offset) != part.nbytes:
                raise BadRequest(f"shared memory region '{part.name}' is smaller than when it was registered")
        return memoryview(buffer)

    def _write(self, owner: str, part: RegionPart, data: memoryview) -> None:
        region = self.find(owner, part.name)
        with self._opened(region.key, region) as (fd, found):
            start = region.offset + part.offset
            if start + len(data) > found.st_size:
                raise BadRequest(f"shared memory region '{part.name}' is smaller than when it was registered")
            _copy(os.pwritev, fd, data, start)

    def _check_range(self, region: Region, part: RegionPart) -> None:
        if part.offset + part.nbytes > region.byte_size:
            raise BadRequest(
                f"Invalid offset + byte size for shared memory region: '{part.name}' has {region.byte_size} bytes, and "
                f"{part.offset} + {part.nbytes} are asked for"
            )

    @contextmanager
    def _opened(self, key: str, region: Region | None = None) -> Generator[tuple[int, os.stat_result]]:
        """Open an object of POSIX shared memory, and check that it is one that this server may use.

        With region, it must be the object that was registered. Raises BadRequest.
        """
        match = _KEY.fullmatch(key)
        if match is None or match[1] in (".", ".."):
            raise BadRequest(
                f"'{key[:_MAX_NAME_CHARS]}' is not the key of a shared memory region: '/' and a file's name"
            )
        refused = BadRequest(f"Unable to open shared memory region: '{key}'")
        try:
            fd = os.open(f"{self._shm}/{match[1]}", _FLAGS)
        except OSError as error:
            raise refused from error
        try:
            found = os.fstat(fd)
            allowed = {os.geteuid(), *map(int, self._limits().client_region_users)}
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in allowed:
                raise refused
            if region is not None and region.place != (found.st_dev, found.st_ino):
                raise BadRequest(f"shared memory '{key}' was replaced since region '{region.name}' was registered")
            yield fd, found
        finally:
            os.close(fd)

    def _folder_of(self, owner: str) -> Path:
        return self._folder / sha256(owner.encode()).hexdigest()

    def _path(self, owner: str, name: str) -> Path:
        return self._folder_of(owner) / f"{sha256(name.encode()).hexdigest()}.json"


def _off() -> SieError:
    text = "shared memory of clients is off on this server (max_client_regions is 0)"
    return SieError(text, code="UNSUPPORTED", http_status=400)


def _copy(move: Callable[[int, Sequence[memoryview], int], int], fd: int, view: memoryview, offset: int) -> int:
    """Read or write all of view at offset; return how many bytes were moved before the end of the file."""
    done = 0
    while done < len(view):
        try:
            count = move(fd, [view[done:]], offset + done)
        except OSError as error:  # no memory left for the pages of a region that was never touched
            raise SieError(f"shared memory: {error.strerror}", code="INVALID_INPUT", http_status=400) from error
        if not count:
            break
        done += count
    return done

"""Identities: a key, a self-signed certificate, and its fingerprint for people to compare."""

from __future__ import annotations

import datetime
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from thinwire.util.files import atomic_file, read_small
from thinwire.util.shown import shown

KEY_FILE = "key.pem"
CERTIFICATE_FILE = "certificate.pem"
CERTIFICATE_BYTES = 2**16
"""Most bytes of a certificate's file."""
ONE_CERTIFICATE = re.compile(r"\s*(-----BEGIN CERTIFICATE-----\s[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----)\s*", re.ASCII)


@dataclass(frozen=True)
class Identity:
    """A worker's own key and certificate."""

    key_path: Path
    certificate_path: Path
    certificate: str
    """PEM, as it stands in the roster."""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.certificate)


def make_identity(folder: Path, name: str, days: float = 3650, *, starts: datetime.datetime | None = None) -> Identity:
    """Make a key and a self-signed certificate in a folder; an identity that is already there is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / KEY_FILE).exists() or (folder / CERTIFICATE_FILE).exists():
        raise ValueError(f"{folder} already holds an identity; choose another folder, or remove it if no roster names it")
    key = ec.generate_private_key(ec.SECP256R1())
    encoded = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    certificate = sign_own(key, name, days, starts)
    with atomic_file(folder / KEY_FILE, 0o600) as file:
        file.write(encoded)
    with atomic_file(folder / CERTIFICATE_FILE) as file:
        file.write(certificate.public_bytes(serialization.Encoding.PEM))
    return load_identity(folder)


def sign_own(key: ec.EllipticCurvePrivateKey, name: str, days: float, starts: datetime.datetime | None) -> x509.Certificate:
    """Sign the certificate of a key with the key itself."""
    now = datetime.datetime.now(datetime.UTC)
    begin = starts or now - datetime.timedelta(days=1)  # a day early, because clocks differ
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after((starts or now) + datetime.timedelta(days=days))
        # strict verifiers want an anchor to be an authority; what it might sign is refused because the bytes differ from the roster's
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(key_id, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id), critical=False)
        .sign(key, hashes.SHA256())
    )


def load_identity(folder: Path) -> Identity:
    """Read the identity that `make_identity` wrote."""
    key_path, certificate_path = folder / KEY_FILE, folder / CERTIFICATE_FILE
    for path in (key_path, certificate_path):
        if not path.exists():
            raise ValueError(f"{path} is missing: make an identity with `thinwire keys`, or name its folder")
    return Identity(key_path, certificate_path, read_certificate(certificate_path))


def read_certificate(path: Path) -> str:
    """Read the certificate in a file, which must hold nothing else."""
    try:
        return written_anew(read_small(path, CERTIFICATE_BYTES).decode("ascii", "replace"))
    except OSError as error:
        raise ValueError(
            f"cannot read the certificate {path}: {error.strerror}; it is the certificate.pem that `thinwire keys` made"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def certificate_of(pem: str) -> bytes:
    """Return the DER bytes of a PEM certificate; refuse a text with anything else in it, which two readers might read in two ways."""
    return parse_certificate(pem).public_bytes(serialization.Encoding.DER)


def written_anew(pem: str) -> str:
    """Return a PEM certificate in the form in which `thinwire keys` writes it."""
    return parse_certificate(pem).public_bytes(serialization.Encoding.PEM).decode("ascii")


def parse_certificate(pem: str) -> x509.Certificate:
    """Parse a text that is one PEM certificate."""
    found = ONE_CERTIFICATE.fullmatch(pem)
    try:
        if found is None:
            raise ValueError("there is other text")
        return x509.load_pem_x509_certificate(found[1].encode())
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise ValueError(
            f"not exactly one certificate in PEM form and nothing else ({shown(error)}): "
            "take the certificate.pem that `thinwire keys` made, as it is"
        ) from None


def fingerprint(pem: str) -> str:
    """Return the sha256 of a certificate in colon groups, for people to compare."""
    return hashlib.sha256(certificate_of(pem)).digest().hex(":").upper()

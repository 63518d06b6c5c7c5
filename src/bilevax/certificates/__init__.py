"""How good a point is. Nothing here imports a solver: any point from anywhere can be judged."""

from bilevax.certificates.certificate import Certificate, line
from bilevax.certificates.certification import certify
from bilevax.certificates.constrained import ConstrainedKKTCertificate
from bilevax.certificates.definition import Definition, judge
from bilevax.certificates.kkt import KKTCertificate
from bilevax.certificates.sampled import SampledCertificate
from bilevax.certificates.stationarity import StationarityCertificate

__all__ = [
    "Certificate",
    "ConstrainedKKTCertificate",
    "Definition",
    "KKTCertificate",
    "SampledCertificate",
    "StationarityCertificate",
    "certify",
    "judge",
    "line",
]

"""Names the gRPC services. Pure."""

from __future__ import annotations

from typing import Final

KSERVE: Final = "inference.GRPCInferenceService"
TRTIS: Final = "nvidia.inferenceserver.GRPCService"
HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

"""The tensor APIs as plain values. HTTP (`sie.frontend.routes`) and gRPC (`sie.frontend.grpc`) are codecs on them."""

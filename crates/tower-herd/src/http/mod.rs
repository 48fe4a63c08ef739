//! HTTP and gRPC: the classifier and its parsers.

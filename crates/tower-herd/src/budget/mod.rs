//! Adaptive throttling: of what fails anyway, a share is not sent.

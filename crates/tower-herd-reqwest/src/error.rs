//! Errors, on their way through the layers and out of the chain.
//!
//! Two things go wrong with errors at this border. [`reqwest_middleware::Error`] is transparent: its
//! `source()` is the source *of what it holds*, so whoever walks the chain never meets what it holds.
//! And a caller who asks `error.is_timeout()` gets `false` as soon as anybody wrapped the error of
//! reqwest. So errors of reqwest stay bare while they are inside, and come out as what they were; all
//! others get one more link, whose `source()` is what it holds.

use std::{error::Error, fmt};
use tower_herd::BoxError;

/// An error that a layer made: a [`Refusal`](tower_herd::Refusal), a timeout of tower, your own.
///
/// It stands between [`reqwest_middleware::Error`] and the layer's error, so that walking the sources
/// of the former meets the latter. It prints as the layer's error does.
pub struct LayerError(BoxError);

impl LayerError {
    /// Wraps the error of a layer.
    #[must_use]
    pub fn new(error: impl Into<BoxError>) -> Self {
        LayerError(error.into())
    }

    /// The layer's error.
    #[must_use]
    pub fn get_ref(&self) -> &(dyn Error + Send + Sync + 'static) {
        &*self.0
    }

    /// The layer's error, owned.
    #[must_use]
    pub fn into_inner(self) -> BoxError {
        self.0
    }
}

impl fmt::Debug for LayerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
impl fmt::Display for LayerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
impl Error for LayerError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.0)
    }
}

/// An error of a middleware further inside, as the layers see it.
///
/// Left bare, it would hide what it holds from every classifier: a connection that an inner
/// middleware was refused, a refusal of an inner stack. At the outer edge it is taken off again.
#[derive(Debug)]
pub struct ChainError(reqwest_middleware::Error);

impl ChainError {
    /// The chain's error.
    #[must_use]
    pub fn get_ref(&self) -> &reqwest_middleware::Error {
        &self.0
    }

    /// The chain's error, owned.
    #[must_use]
    pub fn into_inner(self) -> reqwest_middleware::Error {
        self.0
    }
}

impl fmt::Display for ChainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
impl Error for ChainError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(match &self.0 {
            reqwest_middleware::Error::Middleware(held) => held.as_ref(),
            reqwest_middleware::Error::Reqwest(held) => held,
        })
    }
}

/// What the layers see of an error of the rest of the chain.
pub(crate) fn into_layer_error(error: reqwest_middleware::Error) -> BoxError {
    match error {
        reqwest_middleware::Error::Reqwest(error) => mark_connect_error(error),
        error => ChainError(error).into(),
    }
}

/// What the chain sees of an error of the layers: the inverse of [`into_layer_error`].
pub(crate) fn into_chain_error(error: BoxError) -> reqwest_middleware::Error {
    let error = match error.downcast::<reqwest::Error>() {
        Ok(error) => return (*error).into(),
        Err(error) => error,
    };
    let error = match error.downcast::<ChainError>() {
        Ok(error) => return error.0,
        Err(error) => error,
    };
    match error.downcast::<reqwest_middleware::Error>() {
        Ok(error) => *error,
        Err(error) => reqwest_middleware::Error::middleware(LayerError(error)),
    }
}

/// The one place that knows that a connect error proves "not executed".
///
/// Nothing has to be marked for a classifier that walks the chain of sources: where
/// `reqwest::Error::is_connect()` is true, the chain holds the `hyper_util::client::legacy::Error`
/// that says so (that is how reqwest itself finds out), and, where a peer refused, the `io::Error` of
/// kind `ConnectionRefused` two links below it; `tests/errors.rs` pins both. What a classifier without
/// hyper-util cannot tell are connect errors that are no `ConnectionRefused`: names that do not
/// resolve, connect timeouts, TLS.
fn mark_connect_error(error: reqwest::Error) -> BoxError {
    error.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower_herd::{Refusal, RefusalKind};

    fn refusal() -> Refusal {
        Refusal::new(RefusalKind::Paused, "it asked for a pause", "llm".into(), None)
    }

    #[test]
    fn the_extra_link_is_needed_and_prints_nothing_of_its_own() {
        let naked = reqwest_middleware::Error::middleware(refusal());
        assert!(Refusal::find(&naked).is_none(), "transparent: the source skips what it holds");
        let linked = into_chain_error(refusal().into());
        assert_eq!(Refusal::find(&linked).map(|r| r.kind), Some(RefusalKind::Paused));
        assert_eq!(linked.to_string(), refusal().to_string());
    }

    #[test]
    fn what_an_inner_middleware_holds_is_found_inside_and_comes_out_unchanged() {
        let inside = into_layer_error(reqwest_middleware::Error::middleware(refusal()));
        assert!(Refusal::find(&*inside).is_some());
        match into_chain_error(inside) {
            reqwest_middleware::Error::Middleware(e) => assert!(e.downcast_ref::<Refusal>().is_some()),
            e => panic!("{e:?}"),
        }
    }

    #[test]
    fn an_error_of_reqwest_is_bare_inside_and_outside() {
        let builder = || reqwest::Client::new().get("no url").build().unwrap_err();
        let inside = into_layer_error(builder().into());
        assert!(inside.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_builder));
        assert!(into_chain_error(inside).is_builder());
        // A layer around `HttpService<ClientWithMiddleware>` may hand out the chain's own error.
        assert!(into_chain_error(Box::new(reqwest_middleware::Error::from(builder()))).is_builder());
    }
}

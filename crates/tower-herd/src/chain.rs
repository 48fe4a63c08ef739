//! The walk along an error's sources that every search in an error chain shares.

use std::error::Error;

/// `error` and what caused it, outermost first.
///
/// An `io::Error` names as its source the source of what it holds, and so hides that; the walk goes
/// into it. Chains are short: one that goes in circles ends after 64 links instead of hanging.
pub(crate) fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| {
        match error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
            Some(held) => Some(held as &(dyn Error + 'static)),
            None => error.source(),
        }
    })
    .take(64)
}

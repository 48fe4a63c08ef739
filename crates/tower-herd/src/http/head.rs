use super::{
    body, dialect, grpc,
    stream::{First, Format},
};
use crate::{
    Classify, Exhausted, Kind, Signal,
    classify::{FromProvider, signal_of_error},
};
use http::{Extensions, HeaderMap, HeaderValue, StatusCode, Version, header::CONTENT_TYPE};
use std::{error::Error, fmt, sync::Arc, time::SystemTime};

/// The head of an HTTP reply: all that a classifier may look at, whatever the body's type.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Head<'a> {
    /// Its status.
    pub status: StatusCode,
    /// Its version.
    pub version: Version,
    /// Its headers.
    pub headers: &'a HeaderMap,
    /// Its extensions.
    pub extensions: &'a Extensions,
}

impl<'a> Head<'a> {
    /// The head of `reply`.
    #[must_use]
    pub fn of<B>(reply: &'a http::Response<B>) -> Self {
        Head {
            status: reply.status(),
            version: reply.version(),
            headers: reply.headers(),
            extensions: reply.extensions(),
        }
    }

    /// The head that `parts` are.
    #[must_use]
    pub fn of_parts(parts: &'a http::response::Parts) -> Self {
        Head {
            status: parts.status,
            version: parts.version,
            headers: &parts.headers,
            extensions: &parts.extensions,
        }
    }

    pub(crate) fn content_type(&self) -> &'a [u8] {
        self.headers.get(CONTENT_TYPE).map_or(b"", HeaderValue::as_bytes)
    }

    #[inline]
    fn stamp(&self) -> Option<&'a Signal> {
        if self.extensions.is_empty() { None } else { self.extensions.get() }
    }

    /// A 2xx that is not gRPC, which tells of failures in the head of a 200, and needs HTTP/2.
    #[inline]
    fn is_plain_success(&self) -> bool {
        self.status.is_success()
            && (self.version < Version::HTTP_2 || !self.may_be_grpc())
            && self.stamp().is_none()
    }

    #[inline(never)]
    fn may_be_grpc(&self) -> bool {
        let kind = self.headers.get(CONTENT_TYPE);
        kind.is_none_or(|kind| kind.as_bytes().starts_with(grpc::CONTENT_TYPE))
    }
}

/// The classifier for HTTP and gRPC. See the [module](super).
///
/// A [`Signal`] in the extensions of the reply, a stamp, is preferred: a layer further in has seen
/// more (the body) and has decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HttpClassify;

impl HttpClassify {
    /// The same with another wall clock: replies that name an instant but carry no `Date` are
    /// compared with it.
    #[must_use]
    pub fn with_wall_clock(now: fn() -> SystemTime) -> HttpClassifyAt {
        HttpClassifyAt(now)
    }
}

/// [`HttpClassify`] with a wall clock of its own: see [`HttpClassify::with_wall_clock`].
#[derive(Clone, Copy, Debug)]
pub struct HttpClassifyAt(fn() -> SystemTime);

/// The one place where the wall clock is read.
#[expect(
    clippy::disallowed_methods,
    reason = "a date in a header means the wall clock; it only ever yields a span, and only where the reply has \
              no `Date` of its own to compare with"
)]
pub(crate) fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// The marks that replies bear, the same for every classifier of HTTP: they stand in the extensions.
macro_rules! marks {
    () => {
        fn stamp(&self, reply: &mut http::Response<B>, signal: Signal) {
            reply.extensions_mut().insert(signal);
        }

        fn stamp_exhausted(&self, reply: &mut http::Response<B>, exhausted: Exhausted) {
            // The layer furthest in knows what was really called.
            reply.extensions_mut().get_or_insert_with(|| exhausted);
        }

        fn exhausted(&self, reply: &http::Response<B>) -> bool {
            reply.extensions().get::<Exhausted>().is_some() || is_marked(reply.headers())
        }

        fn stamp_provider(&self, reply: &mut http::Response<B>, provider: &Arc<str>) {
            reply.extensions_mut().insert(FromProvider(provider.clone()));
        }

        fn provider(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Option<Arc<str>> {
            Some(outcome.ok()?.extensions().get::<FromProvider>()?.0.clone())
        }
    };
}

/// Whether a stack beyond the wire has marked its reply: it has given up, or it forbids a repetition. Asked
/// of the headers and not of the signal, which a classifier of yours may make of the status alone.
#[cold]
fn is_marked(headers: &HeaderMap) -> bool {
    headers.get("x-should-retry").is_some_and(|value| value.as_bytes() == b"false")
        || (headers.contains_key(grpc::STATUS) && grpc::is_told_never(headers))
}

impl<B> Classify<http::Response<B>> for HttpClassify {
    #[inline]
    fn classify(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Signal {
        Classify::<http::Response<B>>::classify(&HttpClassifyAt(wall_clock), outcome)
    }

    #[inline]
    fn kind(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Kind {
        Classify::<http::Response<B>>::kind(&HttpClassifyAt(wall_clock), outcome)
    }

    #[inline]
    fn is_plain_success(&self, reply: &http::Response<B>) -> bool {
        Head::of(reply).is_plain_success()
    }

    fn refine(&self, head: Head<'_>, body: &[u8], signal: Signal) -> Signal {
        Classify::<http::Response<B>>::refine(&HttpClassifyAt(wall_clock), head, body, signal)
    }

    marks!();
}

impl<B> Classify<http::Response<B>> for HttpClassifyAt {
    #[inline]
    fn classify(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Signal {
        match outcome {
            Ok(reply) => self.head(Head::of(reply)),
            Err(error) => signal_of_error(error),
        }
    }

    /// A glance: below HTTP/2 a 2xx without extensions is a success, its headers are not looked at.
    #[inline]
    fn kind(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Kind {
        match outcome {
            Ok(reply) if reply.status().is_success() && reply.extensions().is_empty() => {
                if reply.version() < Version::HTTP_2 { Kind::Success } else { grpc_kind(reply.headers()) }
            }
            Ok(reply) => self.head(Head::of(reply)).kind,
            Err(error) => signal_of_error(error).kind,
        }
    }

    #[inline]
    fn is_plain_success(&self, reply: &http::Response<B>) -> bool {
        Head::of(reply).is_plain_success()
    }

    fn refine(&self, head: Head<'_>, body: &[u8], signal: Signal) -> Signal {
        if head.stamp().is_some() || head.headers.contains_key(grpc::STATUS) {
            signal
        } else if !dialect::is_success(head.status) {
            dialect::error_body(head.status, head.headers, body, self.0)
        } else {
            let found = match Format::of(head.content_type()).map(|format| format.first(body)) {
                None => body::of_success(body),
                Some(First::Error(found)) => Some(found),
                Some(_) => None,
            };
            found.map_or(signal, |found| dialect::hidden(found, head.headers, self.0))
        }
    }

    marks!();
}

impl HttpClassifyAt {
    #[inline]
    fn head(self, head: Head<'_>) -> Signal {
        match head.stamp() {
            Some(stamp) => *stamp,
            None => dialect::head(head.status, head.headers, self.0),
        }
    }
}

/// Only gRPC tells of failures in the head of a 200.
fn grpc_kind(headers: &HeaderMap) -> Kind {
    if !headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(grpc::CONTENT_TYPE)) {
        return Kind::Success;
    }
    headers.get(grpc::STATUS).map_or(Kind::Success, |status| grpc::signal(status, headers).kind)
}

/// A classifier made of a function of the head. See [`classify_head`].
#[derive(Clone, Copy)]
pub struct ClassifyHead<F>(F);

/// A classifier from a function of the head, for what only you know of your provider; where it says
/// nothing, [`HttpClassify`] does.
///
/// It fits every layer of a stack: unlike [`classify_fn`](crate::classify_fn) it does not depend on
/// the body's type, which each layer may change.
///
/// ```
/// use tower_herd::{Kind, Signal, classify_head};
///
/// // This search answers 204 where it found nothing.
/// let search = classify_head(|head| (head.status == 204).then(|| Signal::new(Kind::Empty)));
/// # let _ = search;
/// ```
pub fn classify_head<F>(classify: F) -> ClassifyHead<F>
where
    F: Fn(Head<'_>) -> Option<Signal>,
{
    ClassifyHead(classify)
}

impl<B, F> Classify<http::Response<B>> for ClassifyHead<F>
where
    F: Fn(Head<'_>) -> Option<Signal>,
{
    #[inline]
    fn classify(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Signal {
        match outcome.ok().and_then(|reply| (self.0)(Head::of(reply))) {
            Some(signal) => signal,
            None => HttpClassify.classify(outcome),
        }
    }

    #[inline]
    fn kind(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Kind {
        match outcome.ok().and_then(|reply| (self.0)(Head::of(reply))) {
            Some(signal) => signal.kind,
            None => HttpClassify.kind(outcome),
        }
    }

    #[inline]
    fn is_plain_success(&self, reply: &http::Response<B>) -> bool {
        Head::of(reply).is_plain_success() && (self.0)(Head::of(reply)).is_none()
    }

    fn refine(&self, head: Head<'_>, body: &[u8], signal: Signal) -> Signal {
        match (self.0)(head) {
            Some(_) => signal,
            None => Classify::<http::Response<B>>::refine(&HttpClassify, head, body, signal),
        }
    }

    marks!();
}

impl<F> fmt::Debug for ClassifyHead<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClassifyHead")
    }
}

/// A classifier made of a function of head and body. See [`classify_body`].
#[derive(Clone, Copy)]
pub struct ClassifyBody<F>(F);

/// A classifier from a function of the head and the small body behind it; where it says nothing,
/// [`HttpClassify`] does.
///
/// It is asked where a body has been read: by [`ClassifyLayer`](crate::ClassifyLayer), on error
/// replies, and on successes if the layer was told to look into these
/// ([`read_success`](crate::ClassifyLayer::read_success)). The other layers go by the stamp that it
/// leaves.
///
/// Whether an empty answer is healthy only you know: no hits are [`Kind::Empty`], a completion
/// without content is [`Kind::Failed`].
///
/// ```
/// use tower_herd::{Kind, Signal, classify_body};
///
/// let search = classify_body(|head, body| {
///     (head.status == 200 && body == br#"{"hits":[]}"#).then(|| Signal::new(Kind::Empty))
/// });
/// # let _ = search;
/// ```
pub fn classify_body<F>(classify: F) -> ClassifyBody<F>
where
    F: Fn(Head<'_>, &[u8]) -> Option<Signal>,
{
    ClassifyBody(classify)
}

impl<B, F> Classify<http::Response<B>> for ClassifyBody<F>
where
    F: Fn(Head<'_>, &[u8]) -> Option<Signal>,
{
    #[inline]
    fn classify(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Signal {
        HttpClassify.classify(outcome)
    }

    #[inline]
    fn kind(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Kind {
        HttpClassify.kind(outcome)
    }

    #[inline]
    fn is_plain_success(&self, reply: &http::Response<B>) -> bool {
        Head::of(reply).is_plain_success()
    }

    fn refine(&self, head: Head<'_>, body: &[u8], signal: Signal) -> Signal {
        match (self.0)(head, body) {
            Some(signal) => signal,
            None => Classify::<http::Response<B>>::refine(&HttpClassify, head, body, signal),
        }
    }

    marks!();
}

impl<F> fmt::Debug for ClassifyBody<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClassifyBody")
    }
}

use crate::{
    Classify, Exhausted, Head, HttpClassify, Kind, Signal,
    http::{classify_body, classify_head},
};
use std::{error::Error, fmt, sync::Arc};

type OfHead = dyn Fn(Head<'_>) -> Option<Signal> + Send + Sync;
type OfBody = dyn Fn(Head<'_>, &[u8]) -> Option<Signal> + Send + Sync;

/// The one classifier of a [`Herd`](super::Herd): for HTTP and gRPC, with what its owner knows beside.
///
/// A layer of the stack sees the body that the layers below have wrapped, each in its own type; this
/// classifies them all.
#[derive(Clone, Default)]
pub struct HerdClassify(Knows);

#[derive(Clone, Default)]
enum Knows {
    #[default]
    Nothing,
    Head(Arc<OfHead>),
    Body(Arc<OfBody>),
}

impl HerdClassify {
    pub(super) fn head(classify: impl Fn(Head<'_>) -> Option<Signal> + Send + Sync + 'static) -> Self {
        HerdClassify(Knows::Head(Arc::new(classify)))
    }

    pub(super) fn body(classify: impl Fn(Head<'_>, &[u8]) -> Option<Signal> + Send + Sync + 'static) -> Self {
        HerdClassify(Knows::Body(Arc::new(classify)))
    }
}

/// What each of the three says.
macro_rules! ask {
    ($self:ident, |$classify:ident| $ask:expr) => {
        match &$self.0 {
            Knows::Nothing => {
                let $classify = &HttpClassify;
                $ask
            }
            Knows::Head(of) => {
                let $classify = &classify_head(|head: Head<'_>| of(head));
                $ask
            }
            Knows::Body(of) => {
                let $classify = &classify_body(|head: Head<'_>, body: &[u8]| of(head, body));
                $ask
            }
        }
    };
}

impl<B> Classify<http::Response<B>> for HerdClassify {
    #[inline]
    fn classify(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Signal {
        ask!(self, |classify| classify.classify(outcome))
    }

    #[inline]
    fn kind(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Kind {
        ask!(self, |classify| classify.kind(outcome))
    }

    #[inline]
    fn is_plain_success(&self, reply: &http::Response<B>) -> bool {
        ask!(self, |classify| classify.is_plain_success(reply))
    }

    fn refine(&self, head: Head<'_>, body: &[u8], signal: Signal) -> Signal {
        ask!(self, |classify| Classify::<http::Response<B>>::refine(classify, head, body, signal))
    }

    fn stamp(&self, reply: &mut http::Response<B>, signal: Signal) {
        HttpClassify.stamp(reply, signal);
    }

    fn stamp_exhausted(&self, reply: &mut http::Response<B>, exhausted: Exhausted) {
        HttpClassify.stamp_exhausted(reply, exhausted);
    }

    fn exhausted(&self, reply: &http::Response<B>) -> bool {
        HttpClassify.exhausted(reply)
    }

    fn stamp_provider(&self, reply: &mut http::Response<B>, provider: &Arc<str>) {
        HttpClassify.stamp_provider(reply, provider);
    }

    fn provider(&self, outcome: Result<&http::Response<B>, &(dyn Error + 'static)>) -> Option<Arc<str>> {
        HttpClassify.provider(outcome)
    }
}

impl fmt::Debug for HerdClassify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HerdClassify")
    }
}

use super::{Classify, Replies, future::ReplyFuture, layer::Options, report::Report};
use crate::{BoxError, HasTask, Mode, Provider, Switch};
use std::{
    fmt,
    marker::PhantomData,
    task::{Context, Poll},
};
use tower_service::Service;

/// The service of [`ClassifyLayer`](crate::ClassifyLayer).
pub struct Classified<S, C, M> {
    inner: S,
    provider: Provider,
    classify: C,
    options: Options,
    switch: Switch,
    mode: PhantomData<fn() -> M>,
}

impl<S, C, M> Classified<S, C, M> {
    pub(crate) fn new(inner: S, provider: Provider, classify: C, options: Options, switch: Switch) -> Self {
        Classified { inner, provider, classify, options, switch, mode: PhantomData }
    }

    /// The service inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S: Clone, C: Clone, M> Clone for Classified<S, C, M> {
    fn clone(&self) -> Self {
        let (provider, classify) = (self.provider.clone(), self.classify.clone());
        Self::new(self.inner.clone(), provider, classify, self.options, self.switch.clone())
    }
}

impl<S: fmt::Debug, C, M> fmt::Debug for Classified<S, C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Classified")
            .field("inner", &self.inner)
            .field("provider", &self.provider)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

impl<S, C, Req> Service<Req> for Classified<S, C, Replies>
where
    Req: HasTask,
    S: Service<Req>,
    S::Error: Into<BoxError>,
    C: Classify<S::Response> + Clone,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ReplyFuture<S::Future, C>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        let classify = self.classify.clone();
        if self.switch.mode() == Mode::Off {
            self.provider.unlearned();
            return ReplyFuture::pass(&mut self.inner, request, classify);
        }
        // Before the inner call: if that panics, the call is still reported as given up.
        let report = Report::begin(&self.provider, &request);
        ReplyFuture::call(&mut self.inner, request, report, classify)
    }
}

#[cfg(feature = "http")]
impl<S, C, Req, B> Service<Req> for Classified<S, C, super::Bodies>
where
    Req: HasTask,
    S: Service<Req, Response = http::Response<B>>,
    S::Error: Into<BoxError>,
    B: http_body::Body,
    C: Classify<http::Response<B>> + Clone,
{
    type Response = http::Response<super::SensedBody<B>>;
    type Error = BoxError;
    type Future = super::future::ResponseFuture<S::Future, B, C>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        let classify = self.classify.clone();
        if self.switch.mode() == Mode::Off {
            self.provider.unlearned();
            return super::future::ResponseFuture::pass(&mut self.inner, request, classify, self.options);
        }
        let report = Report::begin(&self.provider, &request);
        super::future::ResponseFuture::call(&mut self.inner, request, report, classify, self.options)
    }
}

use super::{DefaultClassify, DefaultMode, service::Classified};
use crate::{Provider, Switch};
use std::{fmt, marker::PhantomData, time::Duration};
use tower_layer::Layer;

/// The sensor: it classifies each outcome once and reports it to the provider, which learns from it.
///
/// The gates above (pause, limit, ladder) only read what the provider knows and decide. Without a
/// sensor each of them senses its own calls, and sees less: no error bodies, no trailers.
///
/// **Where it stands**: innermost but for [`AttemptTimeoutLayer`](crate::AttemptTimeoutLayer). Inside
/// the limit, or calls that wait in our own queue would count as calls of the provider; outside the
/// attempt timeout, or that timeout would hide from it as a dropped call.
///
/// **What it does to a reply.** A success passes untouched; its body is watched to the end
/// ([`SensedBody`](super::SensedBody)): trailers that tell of an error, a broken stream and an early
/// drop are reported too. The small body of an error is read (64 KiB and 1 s at most), because there
/// it says whether a 429 means "wait" or "the account is empty"; the caller gets it back whole. What
/// was found is left on the reply as an extension, the stamp, so that nobody further out reads again.
///
/// Nothing is boxed and nothing allocated unless the reply is an error.
///
/// ```
/// use tower::ServiceBuilder;
/// use tower_herd::{ClassifyLayer, Fleet};
///
/// let provider = Fleet::local().provider("llm");
/// let service = ServiceBuilder::new()
///     // Completions: an error may hide in a 200, or be the first event of the stream.
///     .layer(ClassifyLayer::new(&provider).read_success(16 * 1024))
///     .service_fn(|_: http::Request<()>| async {
///         Ok::<_, std::io::Error>(http::Response::new(http_body_util::Full::new(bytes::Bytes::new())))
///     });
/// # let _ = service;
/// ```
///
/// Replies that are not HTTP pass unchanged in the second mode, [`replies`](ClassifyLayer::replies):
///
/// ```
/// use std::error::Error;
/// use tower::ServiceBuilder;
/// use tower_herd::{ClassifyLayer, Fleet, Kind, Signal, classify_fn};
///
/// let provider = Fleet::local().provider("search");
/// let classify = classify_fn(|outcome: Result<&Vec<u64>, &(dyn Error + 'static)>| match outcome {
///     Ok(hits) if hits.is_empty() => Signal::new(Kind::Empty),
///     Ok(_) => Signal::new(Kind::Success),
///     Err(error) => tower_herd::classify::signal_of_error(error),
/// });
/// let service = ServiceBuilder::new()
///     .layer(ClassifyLayer::new(&provider).classify(classify).replies())
///     .service_fn(|query: u64| async move { Ok::<_, std::io::Error>(vec![query]) });
/// # let _ = service;
/// ```
#[derive(Clone)]
pub struct ClassifyLayer<C = DefaultClassify, M = DefaultMode> {
    provider: Provider,
    classify: C,
    options: Options,
    switch: Switch,
    mode: PhantomData<M>,
}

/// Mode of [`ClassifyLayer`]: HTTP replies, whose bodies are looked into and watched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bodies;

/// Mode of [`ClassifyLayer`]: replies of any type, which end when they are there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Replies;

/// How far bodies are read. Small, since each call carries it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) error_bytes: u32,
    pub(crate) error_millis: u32,
    pub(crate) success_bytes: u32,
    /// How long a stream that has begun is held back until its first content; 0: not at all.
    pub(crate) hold_millis: u32,
}

impl Options {
    /// How much is read of the body behind such a head.
    #[cfg(feature = "http")]
    #[inline]
    pub(crate) fn most(self, signal: &crate::Signal) -> u32 {
        if signal.kind.is_success() { self.success_bytes } else { self.error_bytes }
    }
}

impl ClassifyLayer {
    /// The sensor of `provider`, with the classifier for HTTP and gRPC.
    #[must_use]
    pub fn new(provider: &Provider) -> Self {
        ClassifyLayer {
            provider: provider.clone(),
            classify: DefaultClassify::default(),
            options: Options { error_bytes: 64 * 1024, error_millis: 1000, success_bytes: 0, hold_millis: 0 },
            switch: Switch::default(),
            mode: PhantomData,
        }
    }
}

impl<C, M> ClassifyLayer<C, M> {
    /// Classifies by `classify` instead.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> ClassifyLayer<D, M> {
        ClassifyLayer {
            provider: self.provider,
            classify,
            options: self.options,
            switch: self.switch,
            mode: PhantomData,
        }
    }

    /// Whether it learns, or stands aside ([`Mode::Off`](crate::Mode::Off)): then nothing is read or
    /// stamped, and the provider learns nothing from its calls, nor do the gates above learn in its
    /// place, so that what is known of the provider stays as it is. It refuses nothing, so
    /// [`Mode::Observe`](crate::Mode::Observe) is the same as to enforce.
    #[must_use]
    pub fn switch(mut self, switch: &Switch) -> Self {
        self.switch = switch.clone();
        self
    }

    /// Its switch.
    #[must_use]
    pub fn handle(&self) -> &Switch {
        &self.switch
    }

    /// For replies of any type: the response passes unchanged, and the call is over when it is there.
    #[must_use]
    pub fn replies(self) -> ClassifyLayer<C, Replies> {
        ClassifyLayer {
            provider: self.provider,
            classify: self.classify,
            options: self.options,
            switch: self.switch,
            mode: PhantomData,
        }
    }
}

impl<C> ClassifyLayer<C, Bodies> {
    #[cfg(feature = "herd")]
    #[must_use]
    pub(crate) fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Reads so many bytes of an error's body, for so long (default 64 KiB, 1 s). 0 bytes: none.
    #[must_use]
    pub fn read_error(mut self, bytes: usize, time: Duration) -> Self {
        self.options.error_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.options.error_millis = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        self
    }

    /// Looks into successes too, up to so many bytes (default 0: not at all): for an error inside a
    /// 200, and for streams (server-sent events, Amazon's event stream) that begin with one. Such a reply
    /// is no success for any layer, so it is sent again, or elsewhere, and the caller sees one clean stream.
    /// An error that comes later is passed on as it is, and reported as the end of the call: what has been
    /// handed out is never sent again.
    ///
    /// The head of the reply is held back until this is known: a stream until its first event (comments and
    /// pings are none), other bodies until their end or `bytes`. Bodies that say they are longer, gRPC,
    /// media and line-wise streams pass at once. How long it may take is for the idle timeout to say.
    /// [`hold_until_content`](Self::hold_until_content) waits for more.
    #[must_use]
    pub fn read_success(mut self, bytes: usize) -> Self {
        self.options.success_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self
    }
}

impl<C> ClassifyLayer<C, Bodies> {
    /// Holds a stream back until its first *content*, for so long after its first event; zero (the default):
    /// until that event. Turns on [`read_success`](Self::read_success) with 16 KiB if that is off.
    ///
    /// Many streams begin with an event that says nothing yet: `message_start`, `response.created`, a chunk
    /// with no more than a role. If "overloaded" follows, it is still time to send the request again
    /// without a trace, provided that nothing was handed out. The price: the caller gets the head, and that
    /// first event, together with the first content, so its time to the first byte becomes the time to the
    /// first token. Somebody who shows only content loses nothing; somebody who takes the first byte for
    /// a sign of life should keep this below the patience. When the time is over, or `read_success` bytes
    /// are there, the stream is handed out as it is.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_herd::{ClassifyLayer, Fleet};
    ///
    /// let provider = Fleet::local().provider("llm");
    /// let sensor = ClassifyLayer::new(&provider).hold_until_content(Duration::from_secs(10));
    /// # let _ = sensor;
    /// ```
    #[must_use]
    pub fn hold_until_content(mut self, time: Duration) -> Self {
        self.options.hold_millis = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        if self.options.hold_millis > 0 && self.options.success_bytes == 0 {
            self.options.success_bytes = 16 * 1024;
        }
        self
    }
}

impl<S, C: Clone, M> Layer<S> for ClassifyLayer<C, M> {
    type Service = Classified<S, C, M>;
    fn layer(&self, inner: S) -> Self::Service {
        self.provider.has_sensor();
        let (provider, classify) = (self.provider.clone(), self.classify.clone());
        Classified::new(inner, provider, classify, self.options, self.switch.clone())
    }
}

impl<C, M> fmt::Debug for ClassifyLayer<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClassifyLayer")
            .field("provider", &self.provider)
            .field("options", &self.options)
            .field("switch", &self.switch)
            .finish_non_exhaustive()
    }
}

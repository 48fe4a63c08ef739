use crate::{Kind, Signal};
use std::{error::Error, fmt, sync::Arc};
use tokio::time::Instant;

/// Turns a reply, or the error in its place, into a [`Signal`]. Pure and cheap: it is asked on every
/// call, by several layers.
///
/// For HTTP and gRPC use `HttpClassify`; for other replies [`classify_fn`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot classify replies of type `{Res}`",
    note = "give the layer a classifier: `.classify(classify_fn(|outcome: Result<&Reply, &(dyn Error + 'static)>| ...))`"
)]
pub trait Classify<Res> {
    /// What the outcome says.
    fn classify(&self, outcome: Result<&Res, &(dyn Error + 'static)>) -> Signal;

    /// Only the kind: may be cheaper where the whole signal needs more than a glance.
    fn kind(&self, outcome: Result<&Res, &(dyn Error + 'static)>) -> Kind {
        self.classify(outcome).kind
    }

    /// Whether a glance shows that [`classify`](Classify::classify) would find a plain success, the quota
    /// of its headers aside. The sensor asks this first where it has no need of the quota (see
    /// [`ClassifyLayer`](crate::ClassifyLayer)); false means "look closer". The default always does.
    fn is_plain_success(&self, reply: &Res) -> bool {
        let _ = reply;
        false
    }

    /// What the outcome says after the body of an HTTP reply, or the first part of it, has been read;
    /// `signal` is what [`classify`](Classify::classify) said of the head. The default keeps that.
    #[cfg(feature = "http")]
    fn refine(&self, head: crate::Head<'_>, body: &[u8], signal: Signal) -> Signal {
        let _ = (head, body);
        signal
    }

    /// Leaves `signal` on the reply, for the layers further out. The default leaves nothing: they
    /// then classify for themselves.
    fn stamp(&self, reply: &mut Res, signal: Signal) {
        let _ = (reply, signal);
    }

    /// Marks the reply as the last one of a task that gave up; a mark that is there already stays. The
    /// default leaves no mark.
    fn stamp_exhausted(&self, reply: &mut Res, exhausted: Exhausted) {
        let _ = (reply, exhausted);
    }

    /// Whether the reply bears such a mark: some layer further in, or a stack beyond the wire
    /// (`x-should-retry: false`, a gRPC pushback of -1), has given up on it, and sending it again would
    /// multiply what was done there. Who sees it neither sends again nor counts the request for its retry
    /// budget. The default finds none.
    fn exhausted(&self, reply: &Res) -> bool {
        let _ = reply;
        false
    }

    /// Leaves on the reply which provider it comes from. A ladder does so on replies that are no success.
    /// The default leaves nothing.
    fn stamp_provider(&self, reply: &mut Res, provider: &Arc<str>) {
        let _ = (reply, provider);
    }

    /// Which provider the outcome comes from, where a ladder below says so. The retry budget is kept by
    /// provider. The default does not know.
    fn provider(&self, _: Result<&Res, &(dyn Error + 'static)>) -> Option<Arc<str>> {
        None
    }
}

/// Stands in the extensions of a reply that came through a ladder and is no success: the provider it
/// comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FromProvider(pub Arc<str>);

/// Stands in the extensions of the last real reply when retries have ended without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exhausted {
    /// Wire calls that were made for the request by the layer that gave up.
    pub attempts: u32,
    /// When asking again may help; none if never.
    pub retry_at: Option<Instant>,
}

impl Exhausted {
    /// A mark with these values.
    #[must_use]
    pub const fn new(attempts: u32, retry_at: Option<Instant>) -> Self {
        Exhausted { attempts, retry_at }
    }
}

/// A classifier made of a function. See [`classify_fn`].
#[derive(Clone, Copy)]
pub struct ClassifyFn<F>(F);

/// A classifier from a plain function of the outcome.
///
/// Refusals of our own need no care: the layers tell them apart before they ask.
///
/// ```
/// use std::error::Error;
/// use tower_herd::{Kind, Signal, classify_fn};
///
/// struct Hits(Vec<String>);
/// let search = classify_fn(|outcome: Result<&Hits, &(dyn Error + 'static)>| match outcome {
///     Ok(hits) if hits.0.is_empty() => Signal::new(Kind::Empty),
///     Ok(_) => Signal::new(Kind::Success),
///     Err(_) => Signal::new(Kind::Failed),
/// });
/// # let _ = search;
/// ```
pub fn classify_fn<Res, F>(classify: F) -> ClassifyFn<F>
where
    F: Fn(Result<&Res, &(dyn Error + 'static)>) -> Signal,
{
    ClassifyFn(classify)
}

impl<Res, F> Classify<Res> for ClassifyFn<F>
where
    F: Fn(Result<&Res, &(dyn Error + 'static)>) -> Signal,
{
    #[inline]
    fn classify(&self, outcome: Result<&Res, &(dyn Error + 'static)>) -> Signal {
        match outcome {
            Err(error) if crate::Refusal::find(error).is_some() => Signal::new(Kind::Refused),
            outcome => (self.0)(outcome),
        }
    }
}

impl<F> fmt::Debug for ClassifyFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClassifyFn")
    }
}

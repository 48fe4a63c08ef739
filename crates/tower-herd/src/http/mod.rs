//! HTTP and gRPC: the classifier and its parsers.
use crate::*;
/// stub
#[derive(Clone, Copy, Debug, Default)]
pub struct HttpClassify;
impl<B> Classify<::http::Response<B>> for HttpClassify {
    fn classify(&self, o: Result<&::http::Response<B>, &(dyn std::error::Error + 'static)>) -> Signal {
        match o {
            Ok(r) if r.status().is_success() => Signal::new(Kind::Success),
            Ok(r) => {
                let hint = r.headers().get("retry-after").and_then(|v| v.to_str().ok()?.parse().ok()).map_or(Pushback::None, |s| Pushback::After(std::time::Duration::from_secs(s)));
                Signal::new(match r.status().as_u16() { 429 => Kind::Throttled, 500..=599 => Kind::Failed, _ => Kind::Rejected }).with_pushback(hint)
            }
            Err(e) => if Refusal::find(e).is_some() { Signal::new(Kind::Refused) } else { Signal::new(Kind::Failed) },
        }
    }
}
pub(crate) fn is_timeout(_: &(dyn std::error::Error + 'static)) -> bool { false }

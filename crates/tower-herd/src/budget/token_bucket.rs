use super::Budget;
use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// gRPC's `retryThrottling` (gRFC A6): a bucket that failures empty and successes fill slowly; nothing
/// is repeated while it is half empty or less.
///
/// It starts full at `max_tokens`. A failed call takes one token, a success gives `token_ratio` of one,
/// and a repetition is allowed while more than `max_tokens / 2` are left, which is asked after the
/// failure was taken. The arithmetic is exact, in thousandths of a token, as the specification has it.
///
/// Against [`RatioBudget`](super::RatioBudget), the default: it needs no clock, it stops all repetitions
/// in an outage after `max_tokens / 2` failures, and it starts again only when `1 / token_ratio`
/// successes have made up for each failure. It does *not* keep law 3: while it is more than half full,
/// every failure is repeated. Use it where clients in other languages run by the same configuration.
///
/// Only what could be sent again takes a token, and a server that forbids it (a negative pushback). A 429
/// that is delivered again takes none: see [`Budget::failed`].
///
/// ```
/// use tower_herd::{JitteredRetryLayer, budget::TokenBucketBudget};
/// let layer = JitteredRetryLayer::new().budget(TokenBucketBudget::new(10, 0.1));
/// # let _ = layer;
/// ```
///
/// A clone is the same bucket. Never blocks; a success that finds it full writes nothing.
#[derive(Clone)]
pub struct TokenBucketBudget {
    bucket: Arc<Bucket>,
    parts: Arc<Mutex<HashMap<Box<str>, TokenBucketBudget>>>,
}

/// In thousandths of a token.
struct Bucket {
    tokens: AtomicU64,
    max: u64,
    ratio: u64,
}

const TOKEN: u64 = 1000;

impl TokenBucketBudget {
    /// A full bucket of so many tokens (gRPC allows up to 1000), that gets this part of one back with
    /// each success, to the thousandth; negative or not a number: nothing.
    #[must_use]
    pub fn new(max_tokens: u32, token_ratio: f64) -> Self {
        // The cast saturates, and turns what is not a number into 0.
        let ratio = (token_ratio * TOKEN as f64).round() as u64;
        Self::with(u64::from(max_tokens) * TOKEN, ratio)
    }

    fn with(max: u64, ratio: u64) -> Self {
        let bucket = Bucket { tokens: AtomicU64::new(max), max, ratio };
        TokenBucketBudget { bucket: Arc::new(bucket), parts: Arc::default() }
    }

    /// Tokens in the bucket.
    #[must_use]
    pub fn tokens(&self) -> f64 {
        self.bucket.tokens.load(Ordering::Relaxed) as f64 / TOKEN as f64
    }
}

impl Bucket {
    fn change(&self, change: impl Fn(u64) -> u64) {
        let changed = |tokens| Some(change(tokens)).filter(|new| *new != tokens);
        // An error: nothing changes.
        self.tokens.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed).ok();
    }
}

impl Budget for TokenBucketBudget {
    fn deposit(&self) {}

    fn try_withdraw(&self) -> bool {
        self.bucket.tokens.load(Ordering::Relaxed) > self.bucket.max / 2
    }

    /// Nothing: the token was taken by the failure, which stays one.
    fn refund(&self) {}

    fn open(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let make = || Self::with(self.bucket.max, self.bucket.ratio);
        Some(Arc::new(parts.entry(provider.into()).or_insert_with(make).clone()))
    }

    fn of(&self, provider: &str) -> Option<Arc<dyn Budget>> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.get(provider).map(|part| Arc::new(part.clone()) as Arc<dyn Budget>)
    }

    fn listens(&self) -> bool {
        true
    }

    fn succeeded(&self) {
        let Bucket { max, ratio, .. } = *self.bucket;
        self.bucket.change(|tokens| tokens.saturating_add(ratio).min(max));
    }

    fn failed(&self) {
        self.bucket.change(|tokens| tokens.saturating_sub(TOKEN));
    }

    fn id(&self) -> usize {
        Arc::as_ptr(&self.bucket).addr()
    }
}

impl fmt::Debug for TokenBucketBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenBucketBudget")
            .field("tokens", &self.tokens())
            .field("max_tokens", &(self.bucket.max / TOKEN))
            .field("token_ratio", &(self.bucket.ratio as f64 / TOKEN as f64))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn steps_of_the_vectors() {
        let vectors: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/vectors/budget.json")).unwrap();
        for case in vectors["token_bucket_throttle"]["cases"].as_array().unwrap() {
            let max = case["max_tokens"].as_u64().unwrap() as u32;
            let budget = TokenBucketBudget::new(max, case["token_ratio"].as_f64().unwrap());
            for (n, event) in case["events"].as_str().unwrap().chars().enumerate() {
                match event {
                    'F' => budget.failed(),
                    _ => budget.succeeded(),
                }
                assert_eq!(budget.tokens(), case["tokens_after"][n].as_f64().unwrap(), "{n} of {case}");
                let allowed = case["retry_allowed_after"][n].as_bool().unwrap();
                assert_eq!(budget.try_withdraw(), allowed, "{n} of {case}");
            }
        }
    }

    #[test]
    fn each_provider_has_its_own_bucket_and_odd_settings_are_harmless() {
        let budget = TokenBucketBudget::new(2, f64::NAN);
        let (a, b) = (budget.open("a").unwrap(), budget.open("b").unwrap());
        a.failed();
        a.succeeded();
        assert!(!a.try_withdraw() && !budget.of("a").unwrap().try_withdraw(), "a ratio of nothing");
        assert!(b.try_withdraw() && budget.try_withdraw() && budget.of("c").is_none());
        assert_eq!((a.id(), budget.clone().id()), (budget.of("a").unwrap().id(), budget.id()));
        assert!(!TokenBucketBudget::new(0, f64::INFINITY).try_withdraw(), "no tokens, no retries");
        assert!(budget.listens() && Arc::new(budget).listens());
    }

    proptest! {
        #[test]
        fn tokens_stay_between_none_and_full_and_are_exact(
            max in 0..1000u32,
            ratio in 0..3000u64,
            events in prop::collection::vec(any::<bool>(), 0..200),
        ) {
            let budget = TokenBucketBudget::new(max, ratio as f64 / 1000.0);
            let mut model = u64::from(max) * 1000;
            for success in events {
                if success { budget.succeeded() } else { budget.failed() }
                model = if success { (model + ratio).min(u64::from(max) * 1000) } else { model.saturating_sub(1000) };
                prop_assert_eq!(budget.bucket.tokens.load(Ordering::Relaxed), model);
                prop_assert_eq!(budget.try_withdraw(), 2 * model > u64::from(max) * 1000);
            }
        }
    }
}

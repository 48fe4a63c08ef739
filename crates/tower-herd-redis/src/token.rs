//! Retry tokens.

use crate::{
    config::{ConfigError, RedisConfig},
    error::store_error,
    link::{Purpose, entropy},
    nodes::{Arguments, Code, Nodes, Script},
};
use redis::{FromRedisValue, Value};
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;
use tower_herd::{
    retry_token::{Claim, Grant, HolderId, RetryTokens, Schedule, Token, Wait, WaitCause},
    store::{StoreError, StoreErrorKind},
};

/// Streaks are kept at least this long after a token has opened, however short its waits are.
const LEAST_IDLE: Duration = Duration::from_secs(3600);

/// Retry tokens on Redis or Valkey: one key for each token, one script for each step, the server's own clock. A handle:
/// clones are the same store.
///
/// The key is `herd:token:v1:` and the token's own; nothing else is read or written, so a cluster takes it as it is. The
/// server forgets a token by itself twice its schedule's cap after it has opened, an hour at least, so nobody needs to
/// [`sweep`](RetryTokens::sweep): that walks over all keys of the database, and is for people who clean up.
///
/// Like the [store](crate::RedisStore) it connects when it is first used, on the runtime of who uses it; a step is given up
/// after [`RedisConfig::response_timeout`], and not repeated. A grant whose answer is lost closes its key all the same: the
/// job waits once for nothing.
///
/// What can be lost: Redis confirms before its replicas know, so a failover may lose a token that was just written, and with
/// it one wait and the streak: a job then runs once too early. A server that forgets everything (a restart without
/// persistence, `FLUSHALL`, eviction) opens all keys at once. For jobs that must never run early, take the tokens of
/// `tower-herd-postgres`.
///
/// The rights that are enough (Redis 6.2 does not know `eval_ro` and `evalsha_ro`; `+scan` is for
/// [`sweep`](RetryTokens::sweep) only):
///
/// ```text
/// ACL SETUSER jobs on >PASSWORD ~herd:token:v1:* +eval +evalsha +eval_ro +evalsha_ro +hmget +hset +del +pexpireat +time +scan +hello +cluster|slots
/// ```
#[derive(Clone)]
pub struct RedisTokens(Arc<Inner>);

struct Inner {
    config: RedisConfig,
    nodes: Nodes,
    code: Code,
    random: Mutex<fastrand::Rng>,
}

impl RedisTokens {
    /// One server, by its URL, with defaults otherwise: see [`RedisConfig::single`].
    ///
    /// # Errors
    ///
    /// If the URL is none.
    pub fn open(url: &str) -> Result<Self, ConfigError> {
        Self::new(RedisConfig::single(url)?)
    }

    /// By its configuration. Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// If the configuration cannot work.
    pub fn new(config: RedisConfig) -> Result<Self, ConfigError> {
        let config = config.checked()?;
        let nodes = Nodes::new(&config, Purpose::Other)
            .map_err(|error| ConfigError::Address { place: 0, source: Box::new(error) })?;
        let random = Mutex::new(fastrand::Rng::with_seed(entropy()));
        Ok(RedisTokens(Arc::new(Inner { config, nodes, code: Code::new(include_str!("token.lua")), random })))
    }

    fn prefix(&self) -> String {
        format!("{}:token:v1:", self.0.config.prefix)
    }

    async fn step(&self, key: &str, arguments: &[String], reads: bool) -> Result<Answer, StoreError> {
        let deadline = Instant::now() + self.0.config.response_timeout;
        self.step_by(&format!("{}{key}", self.prefix()), arguments, reads, deadline).await
    }

    async fn step_by(
        &self,
        key: &str,
        arguments: &[String],
        reads: bool,
        deadline: Instant,
    ) -> Result<Answer, StoreError> {
        let script = Script { code: &self.0.code, key, arguments: Arguments::Plain(arguments), reads };
        let (answer, _) = self.0.nodes.ask(key, deadline, &script).await.map_err(store_error)?;
        Answer::read(&answer).ok_or_else(|| StoreErrorKind::Invalid.into())
    }
}

/// What the script answers.
struct Answer {
    done: bool,
    wait: Duration,
    streak: u32,
    holder: u64,
}

impl Answer {
    fn read(value: &Value) -> Option<Self> {
        let (done, wait, streak, holder) = <(bool, u64, u32, String)>::from_redis_value_ref(value).ok()?;
        let holder = if holder.is_empty() { 0 } else { u64::from_str_radix(&holder, 16).ok()? };
        Some(Answer { done, wait: Duration::from_micros(wait), streak, holder })
    }
}

fn micros(time: Duration) -> String {
    time.as_micros().to_string()
}

impl RetryTokens for RedisTokens {
    type Error = StoreError;

    async fn claim(&self, key: &str, schedule: &Schedule) -> Result<Claim, StoreError> {
        let (holder, unit) = {
            let mut random = self.0.random.lock().unwrap_or_else(PoisonError::into_inner);
            (random.u64(..), random.f64())
        };
        // Jitter is drawn here and multiplied there, where the streak is known.
        let jitter = 1.0 + schedule.spread() * (2.0 * unit - 1.0);
        let idle = schedule.cap().saturating_mul(2).max(LEAST_IDLE);
        let arguments = [
            "claim".to_owned(),
            format!("{holder:016x}"),
            micros(schedule.base()),
            schedule.factor().to_string(),
            micros(schedule.cap()),
            schedule.last_exponent().to_string(),
            jitter.to_string(),
            micros(schedule.lease().unwrap_or_default()),
            idle.as_millis().to_string(),
        ];
        let Answer { done, wait, streak, holder } = self.step(key, &arguments, false).await?;
        Ok(match done {
            true => Claim::Granted(Grant { holder: HolderId::from(holder), next_in: wait, streak }),
            false => Claim::NotBefore(Wait { wait, streak, cause: WaitCause::Token }),
        })
    }

    async fn extend(&self, key: &str, holder: HolderId, at_least: Duration) -> Result<bool, StoreError> {
        // A year is for ever, and far from where the script's numbers lose their precision.
        let at_least = at_least.min(Duration::from_secs(366 * 24 * 3600));
        let arguments = ["extend".to_owned(), format!("{:016x}", holder.get()), micros(at_least)];
        Ok(self.step(key, &arguments, false).await?.done)
    }

    async fn clear(&self, key: &str, holder: HolderId) -> Result<bool, StoreError> {
        let arguments = ["clear".to_owned(), format!("{:016x}", holder.get())];
        Ok(self.step(key, &arguments, false).await?.done)
    }

    async fn peek(&self, key: &str) -> Result<Option<Token>, StoreError> {
        let Answer { done, wait, streak, holder } = self.step(key, &["peek".to_owned()], true).await?;
        Ok(done.then(|| Token { holder: HolderId::from(holder), wait, streak }))
    }

    /// Walks over all keys of the database, on each primary, and stops once so many were removed.
    async fn sweep(&self, idle: Duration, limit: u32) -> Result<u64, StoreError> {
        let pattern = format!("{}*", escape(&self.prefix()));
        let arguments = ["sweep".to_owned(), micros(idle.min(Duration::from_secs(366 * 24 * 3600)))];
        let mut swept = 0;
        let timeout = self.0.config.response_timeout;
        for walk in self.0.nodes.walks(Instant::now() + timeout).await.map_err(store_error)? {
            let mut cursor = 0_u64;
            loop {
                let (next, keys) =
                    walk.scan(cursor, &pattern, Instant::now() + timeout).await.map_err(store_error)?;
                for key in keys {
                    if swept >= u64::from(limit) {
                        return Ok(swept);
                    }
                    let answer = self.step_by(&key, &arguments, false, Instant::now() + timeout).await?;
                    swept += u64::from(answer.done);
                }
                cursor = next;
                if cursor == 0 {
                    break;
                }
            }
        }
        Ok(swept)
    }
}

/// A prefix as a pattern that means itself.
fn escape(prefix: &str) -> String {
    let mut pattern = String::new();
    for sign in prefix.chars() {
        if matches!(sign, '*' | '?' | '[' | ']' | '\\' | '^') {
            pattern.push('\\');
        }
        pattern.push(sign);
    }
    pattern
}

impl fmt::Debug for RedisTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisTokens").field(&self.0.config).finish()
    }
}

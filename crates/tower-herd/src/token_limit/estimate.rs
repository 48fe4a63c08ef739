/// How many tokens a call is taken to use before it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenEstimate {
    /// Somebody knows: a tokenizer, and the most that may come out. More than the burst can never pass, and is
    /// refused at once.
    Declared(u64),
    /// Nobody does. A guess above the burst is taken for the burst: it must not refuse a call that would have
    /// fitted (BerriAI/litellm#29193).
    Guess(u64),
}

impl From<u64> for TokenEstimate {
    fn from(tokens: u64) -> Self {
        TokenEstimate::Declared(tokens)
    }
}

/// What a request is taken to use: a closure that returns a number, or a [`TokenEstimate`]; or [`ByBytes`].
pub trait EstimateTokens<Req> {
    /// The estimate for this request.
    fn tokens(&self, request: &Req) -> TokenEstimate;
}

impl<Req, T: Into<TokenEstimate>, F: Fn(&Req) -> T> EstimateTokens<Req> for F {
    #[inline]
    fn tokens(&self, request: &Req) -> TokenEstimate {
        self(request).into()
    }
}

/// In the extensions of an HTTP request: how many tokens it may use, in and out, by whoever knows.
///
/// Where a request declares several limits (`max_tokens` and its newer name), the larger one belongs here: by
/// the smaller one, calls pass that are too large (BerriAI/litellm#37001).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeclaredTokens(pub u64);

/// The estimate of a limit that was given none: what the request [declares](DeclaredTokens), else a guess by the
/// length of its body, a token to 3.5 bytes, and 1024 tokens out.
///
/// That is close for English text, and too much for JSON with images in it. The reply corrects it.
#[derive(Clone, Copy, Debug)]
pub struct ByBytes {
    output: u64,
}

impl ByBytes {
    /// With so many tokens out.
    #[must_use]
    pub const fn output(tokens: u64) -> Self {
        ByBytes { output: tokens }
    }

    /// The guess for a body of so many bytes.
    #[must_use]
    pub const fn guess(self, bytes: u64) -> u64 {
        bytes.saturating_mul(2).div_ceil(7).saturating_add(self.output)
    }
}

impl Default for ByBytes {
    fn default() -> Self {
        Self::output(1024)
    }
}

#[cfg(feature = "http")]
impl<B: http_body::Body> EstimateTokens<http::Request<B>> for ByBytes {
    fn tokens(&self, request: &http::Request<B>) -> TokenEstimate {
        match request.extensions().get() {
            Some(DeclaredTokens(tokens)) => TokenEstimate::Declared(*tokens),
            None => TokenEstimate::Guess(self.guess(request.body().size_hint().lower())),
        }
    }
}

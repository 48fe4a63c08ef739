//! The breaker: nobody calls what is broken, and somebody is told once.

"""Plans: frozen values made by pure functions, without torch."""

from paceline.plan.buckets import BucketPlan, ParamSpec, plan_buckets

__all__ = ["BucketPlan", "ParamSpec", "plan_buckets"]

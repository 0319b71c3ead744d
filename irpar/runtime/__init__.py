"""Running partitioned programs: the executor, engines that compute, and groups that communicate."""
